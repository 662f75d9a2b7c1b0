// Reads a pickle as a tree without executing it. A pickle is a program that may import and call anything. Here an
// import is a node that holds a name, a call is a node that holds its arguments, and there is no table of functions.
// What a tree means is decided by its reader. The standard library alone: no libzero, no torch.
#pragma once
#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

namespace pickle {

enum class Kind : std::uint8_t {
  None,
  Bool,         // integer: 0 or 1
  Integer,      // integer
  LongInteger,  // text: more than 64 bits, little-endian two's complement
  Float,        // number
  Text,         // text: UTF-8
  Bytes,        // text; also Python 2's str
  List,         // items
  Tuple,        // items
  Set,          // items
  Dict,         // items: key, value, key, value, ...
  Global,       // text: "module.name"
  Call,         // items: what is called, its arguments, then what the object was filled with
  Persistent,   // items: the identifier that the program would have resolved
};

// Trees of large models have millions of nodes, so a node is small: which of `integer`, `number` and `text` it has is
// said by its kind.
struct Node {
  Kind kind = Kind::None;
  bool pairs : 1 = false;    // Call: what follows the arguments in items is key, value, ...; else it is a list's
  bool kept : 1 = false;     // the program may refer to it again
  std::uint16_t depth = 0;   // of values in it, when it was made
  std::uint32_t offset = 0;  // of its opcode
  union {
    std::int64_t integer;
    double number;
    std::string_view text;
  };
  std::vector<const Node*> items;
  const Node* state = nullptr;  // the argument of BUILD: what the object would have set its attributes from

  Node() : text() {}
  bool is(Kind wanted) const { return kind == wanted; }
  // Of a Text, Bytes or Global.
  bool is(Kind wanted, std::string_view value) const { return kind == wanted && text == value; }
  bool is_call(std::string_view function) const { return kind == Kind::Call && items[0]->is(Kind::Global, function); }
  // Items of a call's arguments. Arguments are a tuple.
  const std::vector<const Node*>& arguments() const { return items[1]->items; }
  // The value of a text key in a Dict, or in a Call that was filled like one; the last one, as in Python. Null if there
  // is none.
  const Node* find(std::string_view key) const;
  // Calls take(key, value) for the entries of a Dict, or of a Call that was filled like one.
  template <class Take>
  void each(const Take& take) const {
    if (kind != Kind::Dict && !(kind == Kind::Call && pairs)) return;
    for (std::size_t i = kind == Kind::Call ? 2 : 0; i + 1 < items.size(); i += 2) take(*items[i], *items[i + 1]);
  }
};

// What was found at which byte, and what can be read.
struct Fault : std::runtime_error {
  Fault(const std::string& found, const std::string& readable)
      : std::runtime_error("[pickle] got " + found + ", expected " + readable), got(found), expected(readable) {}
  std::string got, expected;
};
[[noreturn]] void fail_at(std::uint64_t offset, const std::string& got, const std::string& expected);

struct Limits {
  std::uint64_t bytes = std::uint64_t{256} << 20;  // less than 4 GiB
  std::uint64_t opcodes = 50'000'000;
  std::uint64_t values = std::uint64_t{1} << 24;      // that are kept at once: 1 GiB of nodes
  std::uint64_t text_bytes = std::uint64_t{1} << 20;  // of one text
  int lowest_protocol = 2, highest_protocol = 5;
  bool python2_texts = false;               // SHORT_BINSTRING and BINSTRING, which Python 2 writes
  std::uint64_t stack = 1 << 18;            // values that no other value holds yet
  const char* readable = "a whole pickle";  // what is expected instead of an opcode without its values
};

// How deep trees are followed: no writer nests deeper, and a list may contain itself.
inline constexpr int kMostDepth = 64;
// Values in each other that a tree may have: beyond it, a file is made to exhaust its readers.
inline constexpr int kMostNested = 1000;

class Tree {
 public:
  // `bytes` must outlive the tree: texts are not copied. Throws Fault. Takes memory proportional to the values.
  explicit Tree(std::string_view bytes, const Limits& limits = {});
  const Node& root() const { return *root_; }
  // One line for people: "collections.OrderedDict({'a': 1})", cut off after `most` characters.
  static std::string text_of(const Node& node, std::size_t most = 160);

 private:
  friend class Machine;
  std::deque<Node> nodes_;
  std::unordered_set<std::string> names_;  // of globals
  const Node* root_ = nullptr;
};

}  // namespace pickle
