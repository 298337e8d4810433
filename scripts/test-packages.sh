#!/usr/bin/env bash
# System packages that some tests use: a browser, for the report page, and Mesa's OpenGL, for frames of MuJoCo worlds.
# Installed where that is possible; elsewhere the tests that need them are skipped or fail, and say what is missing.
set -u
missing=()
command -v chromium > /dev/null || command -v google-chrome > /dev/null || missing+=(chromium)
# The loader alone, which browsers bring too, draws nothing: it takes a driver behind it.
libraries=$(PATH=$PATH:/sbin ldconfig -p)
for library in 'libEGL\.so\.1' 'libGL\.so\.1' 'libEGL_\(mesa\|nvidia\)\.so'; do
    grep -q "$library" <<< "$libraries" || { missing+=(libegl1 libgl1 libegl-mesa0 libgl1-mesa-dri); break; }
done
[ ${#missing[@]} = 0 ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null && exit 0
fi
echo "Tests of the report page or of MuJoCo's worlds need system packages. Install them with: apt-get install ${missing[*]}"
