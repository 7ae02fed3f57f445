#!/usr/bin/env bash
# Installs Debian's Chromium, with which tests drive the page. Needs root.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
install() { timeout 600 apt-get install --yes --quiet --no-install-recommends chromium >/dev/null; }
install || { timeout 300 apt-get update --quiet >/dev/null && install; }
