// Reads the file of a GPU's tuning. docs/tuning.md describes it; tools/tuning_schema.json is what
// CI holds files to, and tests hold both to the same. Plain C++.
//
//   {"schema": 1, "gpu": "NVIDIA H200", "parameters": {"rotary_threads": 128}, "measured": {...}}
//
// Whatever is not as it should be throws std::runtime_error, which says what. Then nothing of the
// file is taken.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>

#include "common/tuning.h"

namespace fuselage {

constexpr int kTuningSchema = 1;
constexpr int kTunableCount = sizeof(kTunables) / sizeof(kTunables[0]);

// What JSON has (RFC 8259), read from front to back.
class JsonReader {
 public:
  explicit JsonReader(const std::string& text) : text_(text) {}

  // f(key) for each member; it must read or skip the value.
  template <typename F>
  void object(F f) {
    expect('{');
    if (take('}')) return;
    do {
      const std::string key = string();
      expect(':');
      f(key);
    } while (take(','));
    expect('}');
  }
  std::string string() {
    expect('"');
    std::string value;
    while (text_[at_] != '"') {
      if (static_cast<unsigned char>(text_[at_]) < ' ') fail("a string is not closed");
      if (text_[at_] == '\\') {
        value += escaped();
      } else {
        value += text_[at_++];
      }
    }
    ++at_;
    return value;
  }
  long integer() {
    const size_t start = space();
    number();
    const std::string written = text_.substr(start, at_ - start);
    if (written.size() > 9 || written.find_first_of(".eE") != std::string::npos)
      fail(written + " is not an integer of nine digits at most");
    // NOTE: not by strtol, which from glibc 2.38 on is another symbol.
    long value = 0;
    for (const char c : written) value = c == '-' ? value : 10 * value + (c - '0');
    return written[0] == '-' ? -value : value;
  }
  void skip(int depth = 0) {
    if (depth > 32) fail("nested too deep");
    switch (text_[space()]) {
      case '{': return object([&](const std::string&) { skip(depth + 1); });
      case '"': return static_cast<void>(string());
      case '[':
        expect('[');
        if (take(']')) return;
        do {
          skip(depth + 1);
        } while (take(','));
        return expect(']');
    }
    for (const char* word : {"true", "false", "null"}) {
      if (text_.compare(at_, std::strlen(word), word) == 0) {
        at_ += std::strlen(word);
        return;
      }
    }
    number();
  }
  void end() {
    if (space() != text_.size()) fail("something follows the end");
  }
  [[noreturn]] void fail(const std::string& what) const {
    int line = 1;
    for (size_t i = 0; i < at_ && i < text_.size(); ++i) line += text_[i] == '\n';
    throw std::runtime_error("line " + std::to_string(line) + ": " + what);
  }

 private:
  // NOTE: text_[text_.size()] is a zero, which is part of nothing: no loop runs past it.
  size_t space() {
    while (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n' || text_[at_] == '\r')
      ++at_;
    return at_;
  }
  bool take(char c) {
    if (text_[space()] != c || c == '\0') return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(std::string("'") + c + "' is missing");
  }
  bool is_digit() const { return text_[at_] >= '0' && text_[at_] <= '9'; }
  void digits() {
    if (!is_digit()) fail("no value, or none that JSON has");
    while (is_digit()) ++at_;
  }
  void number() {
    if (text_[space()] == '-') ++at_;
    const size_t first = at_;
    digits();
    if (text_[first] == '0' && at_ - first > 1) fail("a number starts with a zero");
    if (text_[at_] == '.') ++at_, digits();
    if (text_[at_] == 'e' || text_[at_] == 'E') {
      ++at_;
      if (text_[at_] == '+' || text_[at_] == '-') ++at_;
      digits();
    }
  }
  // Of \u no use is made: it stands for itself.
  char escaped() {
    constexpr char kNames[] = "\"\\/bfnrtu", kValues[] = "\"\\/\b\f\n\r\tu";
    const char* found = text_[at_ + 1] == '\0' ? nullptr : std::strchr(kNames, text_[at_ + 1]);
    if (found == nullptr) fail("an escape that JSON has not");
    at_ += 2;
    return kValues[found - kNames];
  }

  const std::string& text_;
  size_t at_ = 0;
};

// Of `text`, for the GPU of this name.
inline Tuning parse_tuning(const std::string& text, const std::string& gpu) {
  Tuning tuning;
  JsonReader reader(text);
  bool has_schema = false, has_gpu = false, has_parameters = false, has_measured = false;
  const auto once = [&](bool& has, const std::string& key) {
    if (has) reader.fail("\"" + key + "\" is there twice");
    has = true;
  };
  bool has_value[kTunableCount] = {};
  const auto parameter = [&](const std::string& name) {
    for (const Tunable& tunable : kTunables) {
      if (name != tunable.name) continue;
      once(has_value[&tunable - kTunables], name);
      const long value = reader.integer();
      std::string all;
      for (const int each : tunable.values) all += each == 0 ? "" : " " + std::to_string(each);
      if (!tunable.takes(value))
        reader.fail("\"" + name + "\" is " + std::to_string(value) + ", and may be:" + all);
      tuning.*tunable.value = static_cast<int>(value);
      return;
    }
    reader.fail("there is no parameter \"" + name + "\"");
  };
  reader.object([&](const std::string& key) {
    if (key == "schema") {
      once(has_schema, key);
      const long schema = reader.integer();
      if (schema != kTuningSchema) reader.fail("a schema of another version");
    } else if (key == "gpu") {
      once(has_gpu, key);
      const std::string name = reader.string();
      if (name != gpu) reader.fail("it is of \"" + name + "\", and this GPU is \"" + gpu + "\"");
    } else if (key == "parameters") {
      once(has_parameters, key);
      reader.object(parameter);
    } else if (key == "measured") {
      once(has_measured, key);
      reader.skip();
    } else {
      reader.fail("the key \"" + key + "\" is not known");
    }
  });
  reader.end();
  if (!has_schema || !has_gpu || !has_parameters || !has_measured)
    reader.fail("\"schema\", \"gpu\", \"parameters\" or \"measured\" is missing");
  return tuning;
}

// Such as "norm_wide_waves=3, rotary_threads=128": what is not as built in. `all`: everything.
inline std::string describe(const Tuning& tuning, bool all) {
  std::string text;
  for (const Tunable& tunable : kTunables) {
    const int value = tuning.*tunable.value;
    if (!all && value == Tuning{}.*tunable.value) continue;
    text += (text.empty() ? "" : ", ") + std::string(tunable.name) + "=" + std::to_string(value);
  }
  return text;
}

// The name of the file of a GPU: "NVIDIA H100 80GB HBM3" has nvidia-h100-80gb-hbm3.json.
inline std::string tuning_file_name(const std::string& gpu) {
  std::string name;
  bool between = false;
  for (const char c : gpu) {
    const bool upper = c >= 'A' && c <= 'Z';
    if (!upper && !(c >= 'a' && c <= 'z') && !(c >= '0' && c <= '9')) {
      between = true;
      continue;
    }
    if (between && !name.empty()) name += '-';
    between = false;
    name += static_cast<char>(upper ? c - 'A' + 'a' : c);
  }
  return name + ".json";
}

}  // namespace fuselage
