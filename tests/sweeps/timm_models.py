"""Architectures of timm with random weights: every value by plain hooks, stages by timm's own features.

    python -m tests.sweeps.timm_models
    python -m tests.sweeps.timm_models --models resnet10t vit_tiny_patch16_224

Every value of a pass, and `stage1` to `stageN` against `forward_intermediates`. Minutes, so not part of the
suite, which has thirteen. Prints a line a model, and exits with 1 if any value is wrong.
"""

import argparse
import sys
import time
from typing import Any

import numpy as np
import structlog
import timm
import torch

import trocar
from tests.support.oracles.oracle import Array, hooked_outputs, noise, same_bits
from tests.support.servers.running_server import running_server

NAMES = """
test_byobnet test_convnext test_convnext2 test_convnext3 test_efficientnet test_efficientnet_evos
test_efficientnet_gn test_efficientnet_ln test_mambaout test_nfnet test_resnet test_vit test_vit2
test_vit3 test_vit4 resnet10t mobilenetv3_small_050 ghostnet_050 lcnet_035 tinynet_e mnasnet_small
mobilenetv2_035 spnasnet_100 fbnetc_100 efficientnet_lite0 semnasnet_075 mixnet_s hardcorenas_a
regnetx_002 regnety_002 res2net50_48w_2s resnest14d skresnet18 seresnet18 legacy_seresnet18
densenet121 dla46_c darknet17 cspresnet50 repvgg_a0 mobileone_s0 vovnet39a hrnet_w18_small
selecsls42 rexnet_100 xception41 inception_v3 edgenext_xx_small mobilevit_xxs mobilevitv2_050
convit_tiny crossvit_tiny_240 deit_tiny_patch16_224 eva02_tiny_patch14_224 levit_128s pvt_v2_b0
poolformer_s12 efficientformer_l1 fastvit_t8 repvit_m0_9 starnet_s1 tiny_vit_5m_224
xcit_nano_12_p16_224 visformer_tiny
"""
"""Small ones of many families."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=NAMES.split(), help="names")
    arguments = parser.parse_args()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory(), cache_logger_on_first_use=False)
    failed = [name for name in arguments.models if not check(name)]
    print(f"{len(arguments.models)} tried, failed: {failed or 'none'}")
    return 1 if failed else 0


def check(name: str) -> bool:
    """Compare one model, and print how it went."""
    started = time.perf_counter()
    try:
        found = _differing(name)
    except Exception as error:  # noqa: BLE001 - a line of its own, and the next model
        found = [f"{type(error).__name__}: {str(error)[:300]}"]
    print(f"{name:<40} {time.perf_counter() - started:6.1f} s  {found[:5] or 'equal'}", flush=True)
    return not found


def _differing(name: str) -> list[str]:
    torch.manual_seed(0)
    own: Any = timm.create_model(name).eval().requires_grad_(False)
    images = noise(2, *own.pretrained_cfg["input_size"])
    with (
        running_server(
            models={name: {"source": f"timm:{name}", "weights": "random:0"}}, device="cpu"
        ) as server,
        trocar.connect(server.address, timeout_s=600) as client,
    ):
        infos = list(client.plan(name, images, ["**@*"]).feature_maps.values())
        expected = hooked_outputs(own, [images], [info.path for info in infos])
        wrong = []
        for start in range(0, len(infos), 100):
            names = [info.name for info in infos[start : start + 100]]
            maps = client.extract(name, images, names)
            wrong += [
                each
                for each, info in maps.info.items()
                if not same_bits(maps[each], expected[info.path, info.call_index, info.pick])
            ]
        return wrong + _differing_stages(client, name, own, images)


def _differing_stages(client: trocar.Client, name: str, own: Any, images: Array) -> list[str]:
    stages = sorted(stage for stage in client.model(name).stages if stage.startswith("stage"))
    if not stages or not hasattr(own, "forward_intermediates"):
        return []
    with torch.inference_mode():
        values = own.forward_intermediates(torch.from_numpy(images), intermediates_only=True)
    known = {value.numel(): value.numpy() for value in values}
    maps = client.extract(name, images, stages)
    wrong = []
    for stage in stages:
        theirs = known.get(maps[stage].size)
        if (
            theirs is not None
            and maps[stage].shape == theirs.shape
            and not np.array_equal(maps[stage], theirs)
        ):
            wrong.append(stage)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
