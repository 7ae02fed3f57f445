#!/usr/bin/env bash
# Installs what some tests need of Debian, and are skipped without: Chromium, which drives the page, and tcmalloc. Needs root.
set -euo pipefail
packages=(chromium libtcmalloc-minimal4)
dpkg -s "${packages[@]}" >/dev/null 2>&1 && exit
export DEBIAN_FRONTEND=noninteractive
install() { timeout 600 apt-get install --yes --quiet --no-install-recommends "${packages[@]}" >/dev/null; }
install || { timeout 300 apt-get update --quiet >/dev/null && install; }
