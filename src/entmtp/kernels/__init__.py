"""The native int8 library: C++ sources, its C interface, and where to find it."""
