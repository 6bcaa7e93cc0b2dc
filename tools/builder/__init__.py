"""The local builder: what `tools/build_variant.py` is made of.

config      build.toml, read and validated
sources     every source is listed, every include reaches a listed file
identity    the id of this source state, and where it came from
archs       GPU architectures: of build.toml, of the release, of a library
toolchain   compilers, Torch, Python headers, ninja
compile     one compile command a source, and the ninja file
timed       runs one of them, and notes its CPU time
fatbin      what each GPU's machine code takes in a library
costs       size and CPU time by file, and how much of either there may be
package     the variant folder: Python files, library, metadata.json
"""
