// Says when its constructors and main() run, which on an old CPU they must not.

#include <cstdio>

namespace {

struct Early {
  Early() { std::puts("constructor"); }
} early;

}  // namespace

int main() {
  std::puts("main");
  return 0;
}
