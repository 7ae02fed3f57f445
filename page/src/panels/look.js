// Look: what a module computes for an input.
import { parameters } from "../address.js";
import { html } from "../html.js";
import { best, choosePort, collected, hasAttention, input, model, module, passOf, tokens, view } from "../state.js";
import { Best } from "../views/best.js";
import { Channels } from "../views/channels.js";
import { CompareControls, Likeness, limitsOfBoth, Other, otherPasses } from "../views/compare.js";
import { Copy } from "../views/copy.js";
import { Save } from "../views/save.js";
import { working } from "../work.js";

const chosen = { channel: view.channel, ...parameters("look", { query: "", against: "", place: "", order: "strongest", scale: "common" }) };

function Ports() {
  return html`
    <div class="controls"><label>Value <select aria-label="Shown value" value=${view.port.value} onChange=${(event) => choosePort(event.target.value)}>
      <option value="out">output</option><option value="in">input</option>
      ${(hasAttention.value || view.port.value === "pattern") && html`<option value="pattern">attention of its heads</option>`}
    </select></label></div>`;
}

function Look() {
  if (!input.value) return html`<p class="hint">Give the model an input, then choose a module.</p>`;
  if (!view.module.value) return html`<p class="hint">Choose a module to see what it computes.</p>`;
  if (!collected.value.length) return html`<${Ports} /><p class="hint">${working.value || "Nothing was collected."}</p>`;
  const image = { ...input.value, preprocessing: model.value?.preprocessing };
  const both = limitsOfBoth(chosen, collected.value[0]);
  return html`
    <section class="channels" aria-label="Values of ${view.module.value}">
      <h2>${view.module.value} <small>${module.value?.type} ${module.value?.description}</small></h2>
      <${Ports} />
      <${Copy} passes=${[passOf("maps"), ...otherPasses(chosen)]}>${collected.value.map(({ map, tensor }) => html`<${Save} key=${map.name} tensor=${tensor} name=${map.name} />`)}<//>
      <${CompareControls} against=${chosen.against} place=${chosen.place} />
      ${chosen.against.value && html`<${Likeness} against=${chosen.against} place=${chosen.place} value=${collected.value[0]} />`}
      <div class=${chosen.against.value ? "side-by-side" : ""}>
        <div>${chosen.against.value && html`<h3>${model.value?.modelId}, ${input.value.kind === "text" ? input.value.text : input.value.name}</h3><${Best} classes=${best.value} label="Best classes of the first" />`}
          ${collected.value.map(({ map, tensor }) => html`
          <div key=${map.name}>${collected.value.length > 1 && html`<h3>${map.name}</h3>`}
            <${Channels} map=${map} tensor=${tensor} chosen=${chosen} image=${image} tokens=${tokens.value} both=${both} /></div>`)}</div>
        ${chosen.against.value && html`<${Other} against=${chosen.against} place=${chosen.place} chosen=${chosen} tokens=${tokens.value} both=${both} />`}
      </div>
    </section>`;
}

export const look = { name: "look", title: "Look", View: Look, usesModel: true };
