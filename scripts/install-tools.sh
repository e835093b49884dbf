#!/usr/bin/env bash
# Installs what the tests and CI use beyond Rust, where it is missing: a C++ compiler, Python, Node, Chromium,
# Graphviz, curl, shellcheck, Vulkan on the CPU (llvmpipe).
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
need=()
command -v g++ >/dev/null || need+=(g++)
command -v python3 >/dev/null || need+=(python3)
python3 -c 'import venv, ensurepip' 2>/dev/null || need+=(python3-venv)
command -v npm >/dev/null || need+=(npm)
command -v chromium >/dev/null || need+=(chromium)
command -v curl >/dev/null || need+=(curl)
command -v shellcheck >/dev/null || need+=(shellcheck)
command -v dot >/dev/null || need+=(graphviz)
ls /usr/share/vulkan/icd.d/lvp_icd.* >/dev/null 2>&1 || need+=(libvulkan1 mesa-vulkan-drivers)
if ((${#need[@]})); then
  sudo=$(command -v sudo || true)
  $sudo apt-get update -qq
  $sudo apt-get install -y -qq "${need[@]}"
fi
rustup component add rustfmt clippy 2>/dev/null || true
