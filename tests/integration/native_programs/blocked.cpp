// Blocks in read() of descriptor 0, below functions of C++; a program, and a library whose block_in_cpp() does the same.
#include <functional>
#include <unistd.h>
#include <vector>

namespace outer {
namespace {
volatile int sink;
struct Hidden {
  template <typename T> __attribute__((noinline)) void wait(const std::vector<T> &values) {
    char buffer[8];
    sink += write(1, "ready\n", 6);
    sink += read(0, buffer, sizeof buffer) + values.size();
  }
};
} // namespace

class Base {
public:
  virtual void operator()(int depth) = 0;
  virtual ~Base() = default;
};

__attribute__((noinline)) void calls(const std::function<void()> &function) {
  function();
  sink = sink + 1;
}

class Derived : public Base {
public:
  __attribute__((noinline)) void operator()(int depth) override {
    calls([depth] {
      Hidden().wait<double>({1.0 * depth});
      sink = sink + 1;
    });
    sink = sink + 1;
  }
};

__attribute__((noinline)) void runs(Base &base) {
  try {
    base(3);
    sink = sink + 1;
  } catch (int) {
    sink = sink + 2;
  }
}
} // namespace outer

extern "C" __attribute__((noinline)) void block_in_cpp() {
  outer::Derived derived;
  outer::runs(derived);
  outer::sink = outer::sink + 1;
}

int main() {
  block_in_cpp();
  return 0;
}
