// A host test is a program: it returns 0 if every check held, and says which did not.
#pragma once

#include <cstdio>

inline int failures = 0;

inline bool check(bool holds, char const* what) {
  if (holds) return true;
  if (++failures <= 20) std::fprintf(stderr, "failed: %s\n", what);
  return false;
}

// For loops: prints the numbers of the case as well.
template <class... Numbers>
bool check(bool holds, char const* what, Numbers... numbers) {
  if (check(holds, what)) return true;
  if (failures <= 20) {
    std::fprintf(stderr, "  with");
    (std::fprintf(stderr, " %lld", static_cast<long long>(numbers)), ...);
    std::fprintf(stderr, "\n");
  }
  return false;
}

inline int report() {
  if (failures) std::fprintf(stderr, "%d checks failed\n", failures);
  return failures != 0;
}
