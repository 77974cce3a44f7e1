#!/usr/bin/env bash
# Installs a shard worker from a release: `./install.sh` in the unpacked tarball, or from a tarball that is checked first.
#
#   ./install.sh                                   for yourself, into ~/.local
#   ./install.sh --system                          for the machine, into /opt and /usr/local/bin (as root)
#   ./install.sh --prefix DIR                      into DIR (DIR/bin, DIR/share/meshnet-worker)
#   ./install.sh --from TARBALL --index index.json --key release.key.pub     checks the signature (openssl 3) and the hash
#   ./install.sh --libraries DIR                   where a GPU lane's libraries are (libcublas.so.13), if the system's linker knows none
#   ./install.sh --rollback                        the version before this one, if there is one
#   ./install.sh --uninstall                       everything but configuration and data
#
# A new version lies beside the old one; a link says which runs. Exit codes: 0 done, 1 refused (stderr says why), 2 usage.
set -euo pipefail

say() { printf 'install.sh: %s\n' "$*"; }
die() {
  printf 'install.sh: %s\n' "$*" >&2
  exit 1
}
usage() {
  sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit "$1"
}

action=install prefix='' system=no from='' index='' key='' libraries=''
while (($#)); do
  case $1 in
    --system) system=yes ;;
    --rollback | --uninstall) action=${1#--} ;;
    --prefix | --from | --index | --key | --libraries)
      [[ -n ${2:-} ]] || usage 2 >&2
      printf -v "${1#--}" %s "$2"
      shift
      ;;
    -h | --help) usage 0 ;;
    *)
      printf 'install.sh: unknown argument %s\n' "$1" >&2
      usage 2 >&2
      ;;
  esac
  shift
done

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
if [[ $system == yes ]]; then
  [[ -z $prefix ]] || die "--system has its own places; leave --prefix out"
  [[ $(id -u) == 0 ]] || die "--system needs root; without it you install for yourself"
  store=/opt/meshnet-worker bin=/usr/local/bin units=/etc/systemd/system config=/etc/meshnet
else
  [[ -n $prefix ]] || prefix=${HOME:?}/.local
  [[ $prefix == /* ]] || prefix=$PWD/$prefix
  store=$prefix/share/meshnet-worker bin=$prefix/bin units=$prefix/share/systemd/user config=$prefix/etc/meshnet
fi

[[ -z $libraries || -d $libraries ]] || die "--libraries: there is no folder $libraries"
[[ -z $libraries ]] || libraries=$(cd "$libraries" && pwd -P)

# The value of a key of identity.json, which has one entry a line: the first of the name, as `lane` comes before `toolchain`.
identity() { # FOLDER KEY
  sed -n "/^ *\"$2\": \"/{s/^[^:]*: \"\(.*\)\",\{0,1\}$/\1/p;q}" "$1/identity.json"
}

at_least() { # VERSION WANTED
  [[ $(printf '%s\n' "$1" "$2" | sort -V | head -n 1) == "$2" ]]
}

has_library() { # NAME: whether the system's linker finds it
  PATH=$PATH:/usr/sbin:/sbin ldconfig -p | grep -qE "^[[:space:]]*${1//./[.]} "
}

check_driver() { # ACCELERATOR: names the driver that is missing
  local version
  case $1 in
    cpu) ;;
    cuda)
      has_library libcuda.so.1 || die "driver: the cuda lane needs NVIDIA's driver 580 or later, there is no libcuda.so.1; install the driver"
      version=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || version=''
      [[ -z $version ]] || at_least "$version" 580 ||
        die "driver: the cuda lane needs NVIDIA's driver 580 or later, the machine has $version; install a newer one"
      ;;
    rocm)
      [[ -e /dev/kfd ]] || die "driver: the rocm lane needs the kernel's amdgpu driver, there is no /dev/kfd; load it"
      ;;
    vulkan)
      has_library libvulkan.so.1 || die "driver: the vulkan lane needs Vulkan's loader, there is no libvulkan.so.1; install libvulkan1"
      [[ -n ${VK_DRIVER_FILES:-${VK_ICD_FILENAMES:-}} ]] || compgen -G '/usr/share/vulkan/icd.d/*.json' >/dev/null ||
        compgen -G '/etc/vulkan/icd.d/*.json' >/dev/null ||
        die "driver: the vulkan lane needs a Vulkan driver, none is listed in /usr/share/vulkan/icd.d or /etc/vulkan/icd.d; install the GPU's"
      ;;
    *) die "lane: this installer knows no driver for $1" ;;
  esac
}

check_libraries() { # FOLDER ACCELERATOR: names what the program is linked with and the machine lacks
  local missing
  missing=$(LD_LIBRARY_PATH=$libraries LD_TRACE_LOADED_OBJECTS=1 "$1/bin/meshnet-worker" | sed -n 's/^[[:space:]]*\([^ ]*\) => not found.*/\1/p' | paste -sd' ')
  [[ -z $missing ]] || die "libraries: the $2 lane needs $missing; install them, or give their folder with --libraries"
}

flags_of() { # LEVEL: as /proc/cpuinfo names them
  case $1 in
    armv8-a) echo asimd fp ;;
    x86-64-v2) echo cx16 lahf_lm pni popcnt sse4_1 sse4_2 ssse3 ;;
    x86-64-v3) flags_of x86-64-v2 && echo avx2 bmi1 bmi2 f16c fma movbe ;;
  esac
}

check_machine() { # FOLDER: names what does not fit
  local os cpu accelerator glibc have flags flag
  os=$(identity "$1" os) cpu=$(identity "$1" cpu) accelerator=$(identity "$1" accelerator)
  [[ $(uname -s) == Linux && $os == linux ]] || die "lane: this release is for $os, the machine runs $(uname -s)"
  have=$(uname -m)
  [[ $have == "$cpu" ]] || die "lane: this release is for $cpu CPUs, the machine has a $have one"
  glibc=$(identity "$1" glibc)
  have=$(getconf GNU_LIBC_VERSION 2>/dev/null || echo "none")
  at_least "${have##* }" "$glibc" || die "glibc: this release needs $glibc or later, the machine has ${have##* }; use a newer distribution"
  local baseline
  baseline=$(identity "$1" baseline)
  flags=" $(sed -n '/^\(flags\|Features\)/{s/.*: //p;q}' "${MESHNET_CPUINFO:-/proc/cpuinfo}") "
  for flag in $(flags_of "$baseline"); do
    [[ $flags == *" $flag "* ]] || die "CPU: this release needs $baseline, this CPU has no $flag; use a newer machine"
  done
  check_driver "$accelerator"
  check_libraries "$1" "$accelerator"
}

check_content() { # FOLDER
  (cd "$1" && sha256sum --check --strict --quiet SHA256SUMS) >&2 || die "checksums: a file differs from SHA256SUMS; fetch the release again"
  # What is in the folder and in no list was not made by us.
  local extra
  extra=$(cd "$1" && comm -13 <(sed 's/^[0-9a-f]*  //' SHA256SUMS | sort) <(find . ! -type d ! -path ./SHA256SUMS | sed 's,^\./,,' | sort))
  [[ -z $extra ]] || die "checksums: SHA256SUMS does not list $extra"
}

unpack_checked() { # puts the folder into $content
  [[ -f $from ]] || die "--from: there is no file $from"
  if [[ -n $key || -n $index ]]; then
    [[ -n $key && -n $index ]] || die "signature: --index and --key belong together"
    command -v openssl >/dev/null || die "signature: openssl is missing; install it"
    { printf 'meshnet release v1\n'; cat "$index"; } >"$scratch/signed"
    openssl pkeyutl -verify -pubin -inkey "$key" -rawin -in "$scratch/signed" -sigfile "$index.sig" >/dev/null 2>&1 ||
      die "signature: $index was not signed with the key $key; do not use this release"
    local sum
    sum=$(sha256sum "$from")
    grep -A1 -F "\"name\": \"$(basename "$from")\"" "$index" | grep -qF "\"sha256\": \"${sum%% *}\"" ||
      die "signature: $index does not list $(basename "$from") with the hash ${sum%% *}"
    say "signature and hash are right"
  else
    say "WARNING: the signature was not checked; give --index and --key"
  fi
  tar --extract --gzip --no-same-owner --file "$from" --directory "$scratch"
  content=$(find "$scratch" -mindepth 1 -maxdepth 1 -type d)
}

link() { # TARGET LINK: replaced in one step
  ln -sfn "$1" "$2.new" && mv -T "$2.new" "$2"
}

install() {
  local content=$here version name
  if [[ -n $from ]]; then unpack_checked; else say "installing from $here; its signature cannot be checked"; fi
  [[ -f $content/identity.json && -f $content/SHA256SUMS ]] || die "$content is no unpacked release"
  check_content "$content"
  check_machine "$content"
  LD_LIBRARY_PATH=$libraries "$content/bin/meshnet-worker" --version --json | cmp -s - "$content/identity.json" ||
    die "identity: the program does not say of itself what identity.json says; fetch the release again"
  version=$(identity "$content" version)
  name=$version-$(identity "$content" fingerprint | cut -c1-12)
  mkdir -p "$store/versions" "$bin" "$units" "$config"
  if [[ ! -d $store/versions/$name ]]; then
    rm -rf "$store/versions/$name.part"
    cp -R "$content" "$store/versions/$name.part"
    # The program looks there before the system's places.
    [[ -z $libraries ]] || ln -s "$libraries" "$store/versions/$name.part/lib"
    mv "$store/versions/$name.part" "$store/versions/$name"
  fi
  if [[ -L $store/current && $(readlink "$store/current") != versions/$name ]]; then
    link "$(readlink "$store/current")" "$store/previous"
  fi
  link "versions/$name" "$store/current"
  link "$store/current/bin/meshnet-worker" "$bin/meshnet-worker"
  sed -e "s,@BIN@,$bin,g" -e "s,@STORE@,$store,g" -e "s,@CONFIG@,$config,g" "$content/meshnet-worker.service" >"$units/meshnet-worker.service"
  # A GPU is a device of the machine's own.
  [[ $(identity "$content" accelerator) == cpu ]] || sed -i 's/^PrivateDevices=yes$/PrivateDevices=no/' "$units/meshnet-worker.service"
  [[ -e $config/worker.flags ]] || cp "$content/worker.flags.sample" "$config/worker.flags"
  say "installed $name; the program is $bin/meshnet-worker, its flags are in $config/worker.flags"
}

rollback() {
  [[ -L $store/previous && -d $store/previous ]] || die "there is no earlier version in $store"
  local old new
  old=$(readlink "$store/current") new=$(readlink "$store/previous")
  link "$new" "$store/current"
  link "$old" "$store/previous"
  say "${new#versions/} runs from the next start on; $0 --rollback takes that back"
}

uninstall() {
  [[ -d $store ]] || die "nothing is installed in $store"
  rm -rf "$store"
  rm -f "$bin/meshnet-worker" "$units/meshnet-worker.service"
  say "removed; configuration is left in $config"
}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$action"
