// Divides by multiplying, as the GPU does, and counts what differs from the operator. Plain C++,
// built and run by test_policies.py. Prints: <divisions>|<wrong ones>|<the first of them>
#include <cstdio>
#include <random>
#include <vector>

#include "common/divide.h"

namespace {

// common/quotient.h, without __umul64hi.
int64_t quotient(int64_t a, const fuselage::Divisor& b) {
  const auto product = static_cast<unsigned __int128>(a) * b.multiplier >> 64;
  return b.value == 1 ? a : static_cast<int64_t>(product >> b.shift);
}

}  // namespace

int main() {
  std::mt19937_64 random(0);
  const int64_t most = INT64_MAX;
  std::vector<int64_t> divisors;
  for (int64_t value = 1; value <= 5000; ++value) divisors.push_back(value);
  for (int bit = 13; bit < 63; ++bit) {
    for (int64_t near = -1; near <= 1; ++near) divisors.push_back((int64_t{1} << bit) + near);
    divisors.push_back(static_cast<int64_t>(random() >> (63 - bit)) | int64_t{1} << bit);
  }
  divisors.push_back(most);
  long long divisions = 0, wrong = 0, first_a = 0, first_b = 0;
  for (int64_t value : divisors) {
    const fuselage::Divisor divisor(value);
    std::vector<int64_t> numbers = {0, 1, value - 1, value, most, most - 1, most / value * value};
    numbers.push_back(most / value * value - 1);
    for (int bit = 1; bit < 64; ++bit) numbers.push_back(static_cast<int64_t>(random() >> bit));
    for (int64_t number : numbers) {
      ++divisions;
      if (quotient(number, divisor) == number / value) continue;
      if (wrong++ == 0) first_a = number, first_b = value;
    }
  }
  std::printf("%lld|%lld|%lld / %lld\n", divisions, wrong, first_a, first_b);
}
