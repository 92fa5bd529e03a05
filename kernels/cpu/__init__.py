"""CPU kernels: C++ in native/ (start with vec.h and rows.cpp), compiled by `tightwire.native_build`, loaded by `library`, called by the rest."""
