#!/usr/bin/env bash
# System packages that some tests use: a browser, for the report page. Installed where that is possible; elsewhere the
# tests that need them are skipped, and say so.
set -u
command -v chromium > /dev/null || command -v google-chrome > /dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium > /dev/null && exit 0
fi
echo "No browser here: the test that opens the report page is skipped. Install it with: apt-get install chromium"
