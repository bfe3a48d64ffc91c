#!/bin/sh
# SPDX-License-Identifier: MIT
# make install puts what a packager and a user expect where they expect it; make uninstall leaves nothing.
set -u
root=$TMPDIR/root
failed=0
make="make BUILD=$KVT_BUILD DESTDIR=$root prefix=/usr"
unset MAKEFLAGS MFLAGS

wrong() {
	echo "$*"
	failed=1
}

$make install >"$TMPDIR/log" 2>&1 || { cat "$TMPDIR/log"; wrong "make install failed"; }
version=$("$root/usr/bin/kvtier" --version | cut -d' ' -f2)

# A program builds with pkg-config alone and runs with the shared library.
cat >"$TMPDIR/p.c" <<END
#include <kvtier.h>
#include <stdio.h>
int main(void) { return puts(kvt_version()) < 0; }
END
export PKG_CONFIG_PATH="$root/usr/lib/pkgconfig" PKG_CONFIG_SYSROOT_DIR="$root"
# shellcheck disable=SC2046 # lists of flags
{
	cc -o "$TMPDIR/p" "$TMPDIR/p.c" $(pkg-config --cflags --libs kvtier) || wrong "does not build with pkg-config"
	got=$(LD_LIBRARY_PATH=$root/usr/lib "$TMPDIR/p")
	[ "$got" = "$version" ] || wrong "the shared library says \"$got\", the command \"$version\""
	unset PKG_CONFIG_SYSROOT_DIR
	[ "$(pkg-config --modversion kvtier)" = "$version" ] || wrong "kvtier.pc has another version than $version"
	for dir in lib include; do
		got=$(pkg-config --define-variable=prefix=/else --variable=${dir}dir kvtier)
		[ "$got" = "/else/$dir" ] || wrong "kvtier.pc, moved to /else, has its ${dir}dir at $got"
	done
}
LD_LIBRARY_PATH=$root/usr/lib ldd "$TMPDIR/p" | grep -q 'libkvtier\.so\.0 => ' || wrong "the soname is not libkvtier.so.0"
[ "$(readlink "$root/usr/lib/libkvtier.so.0")" = "libkvtier.so.$version" ] || wrong "libkvtier.so.0 is no link to .$version"
"$root/usr/bin/kvtier" doctor >/dev/null || wrong "the installed command does not run"

# Headers stand alone, in C and C++; every public function has a man page.
for header in "$root"/usr/include/*.h; do
	echo "#include <$(basename "$header")>" | cc -Wall -Wextra -Werror -I"$root/usr/include" -fsyntax-only -x c - ||
		wrong "$header does not stand alone in C"
	echo "#include <$(basename "$header")>" | c++ -Wall -Wextra -Werror -I"$root/usr/include" -fsyntax-only -x c++ - ||
		wrong "$header does not stand alone in C++"
done
for name in $(cat "$root"/usr/include/*.h | cpp -I"$root/usr/include" | grep -oE '\bkvt_[a-z0-9_]+\(' | tr -d '(' | sort -u); do
	[ -s "$root/usr/share/man/man3/$name.3" ] || wrong "no man page $name.3"
done
for page in man1/kvtier.1 man7/libkvtier.7; do
	[ -s "$root/usr/share/man/$page" ] || wrong "no man page $page"
done

$make uninstall >"$TMPDIR/log" 2>&1 || { cat "$TMPDIR/log"; wrong "make uninstall failed"; }
left=$(find "$root" ! -type d)
[ -z "$left" ] || wrong "uninstall left: $left"
rm -rf "$root" "$TMPDIR/log" "$TMPDIR/p" "$TMPDIR/p.c"
exit $failed
