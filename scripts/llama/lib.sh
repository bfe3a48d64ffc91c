# SPDX-License-Identifier: MIT
# What the scripts around llama.cpp share: where a real one is kept, and how to run it.
# shellcheck shell=bash

set -euo pipefail

TREE=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
LLAMA_CACHE=${LLAMA_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvtier/llama}
# shellcheck disable=SC2034
BUILD=${BUILD:-$TREE/build}
# Debian's next release, the first that packages llama.cpp: entered with chroot, as its libraries need its libc.
# shellcheck disable=SC2034
ROOT=$LLAMA_CACHE/forky
# One of another version of the backend API, built here.
# shellcheck disable=SC2034
SOURCE=$LLAMA_CACHE/source
# A larger trained model.
# shellcheck disable=SC2034
MODEL=$LLAMA_CACHE/model

die() { echo "${0##*/}: $*" >&2; exit 1; }
