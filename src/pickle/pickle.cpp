// See pickle.h. The opcodes are those of Python's pickletools.py. Iterative, and every size is compared with the bytes
// that are left before anything is allocated.
#include "pickle/pickle.h"

#include <algorithm>
#include <bit>
#include <cstdio>

namespace pickle {

void fail_at(std::uint64_t offset, const std::string& got, const std::string& expected) {
  throw Fault(got + " at byte " + std::to_string(offset), expected);
}

const Node* Node::find(std::string_view key) const {
  const Node* found = nullptr;
  each([&](const Node& name, const Node& value) {
    if ((name.kind == Kind::Text || name.kind == Kind::Bytes) && name.text == key) found = &value;
  });
  return found;
}

// Runs the opcodes on a stack of nodes.
class Machine {
 public:
  Machine(Tree& tree, std::string_view bytes, const Limits& limits) : tree_(tree), bytes_(bytes), limits_(limits) {}

  const Node* run() {
    const std::string wanted = limits_.lowest_protocol == limits_.highest_protocol
                                   ? "a pickle of protocol " + std::to_string(limits_.lowest_protocol)
                                   : "a pickle of protocol " + std::to_string(limits_.lowest_protocol) + " to " +
                                         std::to_string(limits_.highest_protocol);
    if (bytes_.size() > limits_.bytes)
      fail_at(limits_.bytes, std::to_string(bytes_.size()) + " bytes", "at most " + std::to_string(limits_.bytes));
    if (bytes_.size() < 2 || bytes_[0] != '\x80') fail_at(0, "no pickle", wanted);
    const int protocol = static_cast<unsigned char>(bytes_[1]);
    if (protocol < limits_.lowest_protocol || protocol > limits_.highest_protocol)
      fail_at(1, "protocol " + std::to_string(protocol), wanted);
    at_ = 2;
    for (;;) {
      opcode_ = at_;
      if (++opcodes_ > limits_.opcodes)
        fail("more than " + std::to_string(limits_.opcodes) + " opcodes", limits_.readable);
      const char code = take(1)[0];
      if (code == '.') break;
      if (!scalar(code) && !text(code) && !container(code) && !memory(code) && !object(code)) {
        char hex[16];
        std::snprintf(hex, sizeof hex, "opcode 0x%02x", static_cast<unsigned>(static_cast<unsigned char>(code)));
        fail(hex, limits_.readable);
      }
    }
    if (stack_.size() != 1 || !marks_.empty()) fail("an end inside of a value", "one value");
    if (at_ != bytes_.size())
      fail_at(at_, std::to_string(bytes_.size() - at_) + " bytes after the end", "the end of the file");
    return stack_[0];
  }

 private:
  [[noreturn]] void fail(const std::string& got, const std::string& expected) const { fail_at(opcode_, got, expected); }

  std::string_view take(std::uint64_t size) {
    if (size > bytes_.size() - at_) fail_at(bytes_.size(), "the end of the file", "more bytes: the file is incomplete");
    const std::string_view taken = bytes_.substr(at_, size);
    at_ += size;
    return taken;
  }
  // Little-endian.
  std::uint64_t number(std::size_t size) {
    std::uint64_t value = 0;
    const std::string_view taken = take(size);
    for (std::size_t i = size; i-- > 0;) value = value << 8 | static_cast<unsigned char>(taken[i]);
    return value;
  }
  std::string_view line() {
    const std::size_t end = bytes_.find('\n', at_);
    if (end == std::string_view::npos) fail_at(bytes_.size(), "the end of the file", "the name of a function");
    if (end - at_ > limits_.text_bytes) too_long(end - at_);
    const std::string_view taken = take(end - at_);
    ++at_;
    return taken;
  }
  [[noreturn]] void too_long(std::uint64_t size) const {
    fail("a text of " + std::to_string(size) + " bytes", "at most " + std::to_string(limits_.text_bytes));
  }

  Node& push(Kind kind) {
    if (stack_.size() >= limits_.stack)
      fail("more than " + std::to_string(limits_.stack) + " values side by side", limits_.readable);
    if (tree_.nodes_.size() >= limits_.values)
      fail("more than " + std::to_string(limits_.values) + " values", limits_.readable);
    Node& node = tree_.nodes_.emplace_back();
    node.kind = kind;
    node.offset = static_cast<std::uint32_t>(opcode_);
    stack_.push_back(&node);
    return node;
  }
  bool integer(Kind kind, std::int64_t value) {
    push(kind).integer = value;
    return true;
  }
  bool push_text(Kind kind, std::uint64_t size) {
    const auto taken = take(size);
    if (size > limits_.text_bytes) too_long(size);
    push(kind).text = taken;
    return true;
  }

  // The last value, which a mark must not separate from its opcode.
  Node* pop() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) fail("an opcode without its value", limits_.readable);
    Node* const last = stack_.back();
    stack_.pop_back();
    return last;
  }
  std::vector<const Node*> pop(std::size_t count) {
    std::vector<const Node*> items(count);
    for (std::size_t i = count; i-- > 0;) items[i] = pop();
    return items;
  }
  std::vector<const Node*> pop_to_mark() {
    if (marks_.empty()) fail("an opcode without its mark", limits_.readable);
    std::vector<const Node*> items = pop(stack_.size() - marks_.back());
    marks_.pop_back();
    return items;
  }
  // Values that were popped for good, in the order in which they were pushed. The last node of all is in no other
  // value, since a value that is made of others comes after them or was put on the stack before them.
  void forget(const std::vector<const Node*>& values) {
    for (std::size_t i = values.size(); i-- > 0 && values[i] == &tree_.nodes_.back() && !values[i]->kept;)
      tree_.nodes_.pop_back();
  }
  bool container(Kind kind, std::vector<const Node*> items) {
    Node& node = push(kind);
    deepen(node, items);
    node.items = std::move(items);
    return true;
  }
  void deepen(Node& whole, const std::vector<const Node*>& items) const {
    for (const Node* const item : items) whole.depth = std::max<std::uint16_t>(whole.depth, item->depth + 1);
    if (whole.depth > kMostNested)
      fail("more than " + std::to_string(kMostNested) + " values in each other", limits_.readable);
  }
  // A list, set or dictionary, or an object that is filled like one.
  bool append(Kind kind, const std::vector<const Node*>& items) {
    Node& whole = *pop();
    stack_.push_back(&whole);
    const bool dict = kind == Kind::Dict;
    if (dict && items.size() % 2 != 0) fail("a key without a value", limits_.readable);
    if (whole.kind == Kind::Call) {
      if (whole.items.size() > 2 && whole.pairs != dict) fail("a list that is a dictionary", limits_.readable);
      whole.pairs = dict;
    } else if (whole.kind != kind) {
      fail("an opcode for a value of another kind", limits_.readable);
    }
    deepen(whole, items);
    whole.items.insert(whole.items.end(), items.begin(), items.end());
    return true;
  }

  bool scalar(char code) {
    switch (code) {
      case '\x95':  // FRAME: a hint for reading ahead
        if (number(8) > bytes_.size() - at_)
          fail_at(bytes_.size(), "the end of the file", "more bytes: the file is incomplete");
        return true;
      case 'N':
        push(Kind::None);
        return true;
      case '\x88':
        return integer(Kind::Bool, 1);
      case '\x89':
        return integer(Kind::Bool, 0);
      case 'K':
        return integer(Kind::Integer, static_cast<std::int64_t>(number(1)));
      case 'M':
        return integer(Kind::Integer, static_cast<std::int64_t>(number(2)));
      case 'J':
        return integer(Kind::Integer, static_cast<std::int32_t>(number(4)));
      case '\x8a':
        return long_integer(number(1));
      case '\x8b':
        return long_integer(number(4));
      case 'G': {  // big-endian
        std::uint64_t bits = 0;
        for (const char byte : take(8)) bits = bits << 8 | static_cast<unsigned char>(byte);
        push(Kind::Float).number = std::bit_cast<double>(bits);
        return true;
      }
      default:
        return false;
    }
  }
  bool long_integer(std::uint64_t size) {
    if (size > 8) return push_text(Kind::LongInteger, size);
    const std::uint64_t value = number(size);
    const int unused = 64 - 8 * static_cast<int>(size);
    return integer(Kind::Integer, size == 0 ? 0 : static_cast<std::int64_t>(value << unused) >> unused);
  }

  bool text(char code) {
    switch (code) {
      case 'U':
        return limits_.python2_texts && push_text(Kind::Bytes, number(1));
      case 'T':
        return limits_.python2_texts && push_text(Kind::Bytes, number(4));
      case '\x8c':
        return push_text(Kind::Text, number(1));
      case 'X':
        return push_text(Kind::Text, number(4));
      case '\x8d':
        return push_text(Kind::Text, number(8));
      case 'C':
        return push_text(Kind::Bytes, number(1));
      case 'B':
        return push_text(Kind::Bytes, number(4));
      case '\x8e':
        return push_text(Kind::Bytes, number(8));
      default:
        return false;
    }
  }

  bool container(char code) {
    switch (code) {
      case '(':
        marks_.push_back(stack_.size());
        return true;
      case '0':
        forget({pop()});
        return true;
      case '1':
        forget(pop_to_mark());
        return true;
      case ']':
        return container(Kind::List, {});
      case '}':
        return container(Kind::Dict, {});
      case '\x8f':
        return container(Kind::Set, {});
      case ')':
        return container(Kind::Tuple, {});
      case '\x85':
        return container(Kind::Tuple, pop(1));
      case '\x86':
        return container(Kind::Tuple, pop(2));
      case '\x87':
        return container(Kind::Tuple, pop(3));
      case 't':
        return container(Kind::Tuple, pop_to_mark());
      case 'l':
        return container(Kind::List, pop_to_mark());
      case 'd': {
        auto items = pop_to_mark();
        if (items.size() % 2 != 0) fail("a key without a value", limits_.readable);
        return container(Kind::Dict, std::move(items));
      }
      case 'a':
        return append(Kind::List, pop(1));
      case 'e':
        return append(Kind::List, pop_to_mark());
      case 's':
        return append(Kind::Dict, pop(2));
      case 'u':
        return append(Kind::Dict, pop_to_mark());
      case '\x90':
        return append(Kind::Set, pop_to_mark());
      default:
        return false;
    }
  }

  // Writers number the values that they may refer to again, from 0 or 1.
  bool memory(char code) {
    switch (code) {
      case '\x94':
        return remember(memory_.size());
      case 'q':
        return remember(number(1));
      case 'r':
        return remember(number(4));
      case 'h':
        return recall(number(1));
      case 'j':
        return recall(number(4));
      default:
        return false;
    }
  }
  bool remember(std::uint64_t place) {
    if (place > opcodes_) fail("the number " + std::to_string(place) + " of a value", "numbers in order");
    Node* const last = pop();
    stack_.push_back(last);
    if (place >= memory_.size()) memory_.resize(place + 1);
    memory_[place] = last;
    last->kept = true;
    return true;
  }
  bool recall(std::uint64_t place) {
    if (place >= memory_.size() || memory_[place] == nullptr) fail("a reference to nothing", limits_.readable);
    stack_.push_back(memory_[place]);
    return true;
  }

  bool object(char code) {
    switch (code) {
      case 'c': {
        const auto module = line();
        return global(module, line());
      }
      case '\x93': {
        const auto names = pop(2);
        if (names[0]->kind != Kind::Text || names[1]->kind != Kind::Text)
          fail("a function without a name", limits_.readable);
        return global(names[0]->text, names[1]->text);
      }
      case 'R':
      case '\x81':
        return call(pop(2));
      case '\x92': {  // (class, arguments, keywords), as protocol 2 writes it
        auto given = pop(3);
        global("copyreg", "__newobj_ex__");
        container(Kind::Tuple, std::move(given));
        return call(pop(2));
      }
      case 'b': {
        const Node* const state = pop();
        Node* const value = pop();
        deepen(*value, {state});
        value->state = state;
        stack_.push_back(value);
        return true;
      }
      case 'Q':
        return container(Kind::Persistent, pop(1));
      default:
        return false;
    }
  }
  bool global(std::string_view module, std::string_view name) {
    std::string whole(module);
    whole.append(".").append(name);
    push(Kind::Global).text = *tree_.names_.insert(std::move(whole)).first;  // files repeat few names
    return true;
  }
  bool call(std::vector<const Node*> items) {
    if (items[1]->kind != Kind::Tuple) fail("a call without arguments", limits_.readable);
    return container(Kind::Call, std::move(items));
  }

  Tree& tree_;
  std::string_view bytes_;
  const Limits& limits_;
  std::uint64_t at_ = 0, opcode_ = 0, opcodes_ = 0;
  std::vector<Node*> stack_;
  std::vector<std::size_t> marks_;
  std::vector<Node*> memory_;
};

Tree::Tree(std::string_view bytes, const Limits& limits) { root_ = Machine(*this, bytes, limits).run(); }

namespace {

// Appends until `out` is full.
class Writer {
 public:
  Writer(std::string& out, std::size_t most) : out_(out), most_(most) {}

  void write(const Node& node, int depth) {
    if (full()) return;
    if (depth > kMostDepth) return put("...");
    switch (node.kind) {
      case Kind::None:
        return put("None");
      case Kind::Bool:
        return put(node.integer != 0 ? "True" : "False");
      case Kind::Integer:
        return put(std::to_string(node.integer));
      case Kind::LongInteger:
        return put("an integer of " + std::to_string(node.text.size()) + " bytes");
      case Kind::Float: {
        char text[32];
        std::snprintf(text, sizeof text, "%.9g", node.number);
        return put(text);
      }
      case Kind::Text:
        put("'");
        put(node.text);
        return put("'");
      case Kind::Bytes:
        return put(std::to_string(node.text.size()) + " bytes");
      case Kind::List:
        return list("[", node.items, "]", depth);
      case Kind::Tuple:
        return list("(", node.items, ")", depth);
      case Kind::Set:
      case Kind::Dict:
        return list("{", node.items, "}", depth, node.kind == Kind::Dict);
      case Kind::Global:
        return put(node.text);
      case Kind::Persistent:
        return list("persistent(", node.items, ")", depth);
      case Kind::Call:
        write(*node.items[0], depth + 1);
        list("(", node.arguments(), ")", depth);
        if (node.items.size() > 2)
          list(node.pairs ? "{" : "[", {node.items.begin() + 2, node.items.end()}, node.pairs ? "}" : "]", depth,
               node.pairs);
        if (node.state) {
          put(" with ");
          write(*node.state, depth + 1);
        }
    }
  }

 private:
  bool full() const { return out_.size() >= most_; }
  void put(std::string_view text) {
    if (!full()) out_ += text.substr(0, most_ - out_.size());
  }
  void list(const char* open, const std::vector<const Node*>& items, const char* close, int depth, bool pairs = false) {
    put(open);
    for (std::size_t i = 0; i < items.size() && !full(); ++i) {
      if (i > 0) put(pairs && i % 2 == 1 ? ": " : ", ");
      write(*items[i], depth + 1);
    }
    put(close);
  }

  std::string& out_;
  std::size_t most_;
};

}  // namespace

std::string Tree::text_of(const Node& node, std::size_t most) {
  std::string out;
  Writer(out, most + 1).write(node, 0);
  if (out.size() > most) out.replace(most, std::string::npos, "...");
  return out;
}

}  // namespace pickle
