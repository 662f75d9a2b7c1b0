// See pickle.h. The opcodes are those of Python's pickletools.py; all sizes are checked before anything is read, and no
// more values are made than a large file of pictures has.
#include "data/pickle.h"

#include <cstdio>
#include <unordered_map>

namespace data {
namespace {

using Kind = PickleValue::Kind;

constexpr std::size_t kMostValues = 1'000'000;

bool is(const PickleValue& value, Kind kind, std::string_view text) { return value.kind == kind && value.text == text; }

}  // namespace

const PickleValue* PickleValue::find(std::string_view key) const {
  for (std::size_t i = items.size(); kind == Kind::Dict && i >= 2; i -= 2)
    if (is(*items[i - 2], Kind::Text, key)) return items[i - 1];
  return nullptr;
}

// Runs the opcodes on a stack of values.
class Pickle::Machine {
 public:
  Machine(Pickle& owner, std::string_view bytes) : owner_(owner), bytes_(bytes) {}

  const PickleValue* run() {
    if (bytes_.size() < 2 || bytes_[0] != '\x80') fail(0, "no pickle", "a pickle of protocol 2");
    if (bytes_[1] != 2)
      fail(1, "protocol " + std::to_string(static_cast<unsigned char>(bytes_[1])), "a pickle of protocol 2");
    at_ = 2;
    for (;;) {
      opcode_ = at_;
      const char code = take(1)[0];
      if (code == '.') break;
      if (!scalar(code) && !container(code) && !memory(code) && !call(code)) {
        char text[16];
        std::snprintf(text, sizeof text, "opcode 0x%02x", static_cast<unsigned>(static_cast<unsigned char>(code)));
        fail(opcode_, text, kWhatIsRead);
      }
    }
    if (stack_.size() != 1 || !marks_.empty()) fail(opcode_, "an end inside of a value", "one value");
    if (at_ != bytes_.size())
      fail(at_, std::to_string(bytes_.size() - at_) + " bytes after the end", "the end of the file");
    return stack_[0];
  }

 private:
  static constexpr const char* kWhatIsRead = "numbers, texts, lists, dictionaries and numpy arrays of uint8";

  [[noreturn]] static void fail(std::size_t at, const std::string& got, const std::string& expected) {
    throw PickleFault(got + " at byte " + std::to_string(at), expected);
  }

  std::string_view take(std::size_t size) {
    if (size > bytes_.size() - at_) fail(bytes_.size(), "the end of the file", "more bytes: the file is incomplete");
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
    if (end == std::string_view::npos) fail(bytes_.size(), "the end of the file", "the name of a function");
    const std::string_view taken = take(end - at_);
    ++at_;
    return taken;
  }

  PickleValue& push(Kind kind) {
    if (owner_.values_.size() >= kMostValues) fail(opcode_, "more than 1000000 values", "a batch of pictures");
    PickleValue& value = owner_.values_.emplace_back();
    value.kind = kind;
    stack_.push_back(&value);
    return value;
  }
  bool integer(std::int64_t value) {
    push(Kind::Integer).integer = value;
    return true;
  }
  bool text(std::string_view value) {
    push(Kind::Text).text = value;
    return true;
  }

  // The last value, which a mark must not separate from its opcode.
  PickleValue* pop() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back()))
      fail(opcode_, "an opcode without its value", kWhatIsRead);
    PickleValue* const last = stack_.back();
    stack_.pop_back();
    return last;
  }
  std::vector<const PickleValue*> pop(std::size_t count) {
    std::vector<const PickleValue*> items(count);
    for (std::size_t i = count; i-- > 0;) items[i] = pop();
    return items;
  }
  std::vector<const PickleValue*> pop_to_mark() {
    if (marks_.empty()) fail(opcode_, "an opcode without its mark", kWhatIsRead);
    std::vector<const PickleValue*> items = pop(stack_.size() - marks_.back());
    marks_.pop_back();
    return items;
  }
  PickleValue& top(Kind kind) {
    PickleValue* const last = pop();
    if (last->kind != kind) fail(opcode_, "an opcode for a value of another kind", kWhatIsRead);
    stack_.push_back(last);
    return *last;
  }
  bool tuple(std::vector<const PickleValue*> items) {
    push(Kind::Tuple).items = std::move(items);
    return true;
  }
  bool append(Kind kind, const std::vector<const PickleValue*>& items) {
    PickleValue& whole = top(kind);
    if (kind == Kind::Dict && items.size() % 2 != 0) fail(opcode_, "a key without a value", kWhatIsRead);
    whole.items.insert(whole.items.end(), items.begin(), items.end());
    return true;
  }

  bool scalar(char code) {
    switch (code) {
      case 'N':
        push(Kind::None);
        return true;
      case '\x88':  // True
        return integer(1);
      case '\x89':  // False
        return integer(0);
      case 'K':
        return integer(static_cast<std::int64_t>(number(1)));
      case 'M':
        return integer(static_cast<std::int64_t>(number(2)));
      case 'J':
        return integer(static_cast<std::int32_t>(number(4)));
      case '\x8a': {  // Python 2's long
        const std::size_t size = number(1);
        if (size > 8) fail(opcode_, "a number of " + std::to_string(size) + " bytes", "at most 8");
        const std::uint64_t value = number(size);
        const int unused = 64 - 8 * static_cast<int>(size);
        return integer(size == 0 ? 0 : static_cast<std::int64_t>(value << unused) >> unused);
      }
      case 'U':
        return text(take(number(1)));
      case 'T':
      case 'X':
        return text(take(number(4)));
      default:
        return false;
    }
  }

  bool container(char code) {
    switch (code) {
      case '(':
        marks_.push_back(stack_.size());
        return true;
      case ']':
        push(Kind::List);
        return true;
      case '}':
        push(Kind::Dict);
        return true;
      case ')':
        return tuple({});
      case '\x85':
        return tuple(pop(1));
      case '\x86':
        return tuple(pop(2));
      case '\x87':
        return tuple(pop(3));
      case 't':
        return tuple(pop_to_mark());
      case 'a':
        return append(Kind::List, pop(1));
      case 'e':
        return append(Kind::List, pop_to_mark());
      case 's':
        return append(Kind::Dict, pop(2));
      case 'u':
        return append(Kind::Dict, pop_to_mark());
      default:
        return false;
    }
  }

  // Python numbers the values that it may refer to again.
  bool memory(char code) {
    const bool puts = code == 'q' || code == 'r';
    if (!puts && code != 'h' && code != 'j') return false;
    const std::uint64_t place = number(code == 'q' || code == 'h' ? 1 : 4);
    if (puts) {
      PickleValue* const last = pop();
      stack_.push_back(last);
      memory_[place] = last;
    } else {
      const auto found = memory_.find(place);
      if (found == memory_.end()) fail(opcode_, "a reference to nothing", kWhatIsRead);
      stack_.push_back(found->second);
    }
    return true;
  }

  bool call(char code) {
    if (code == 'c') {
      std::string name(line());
      if (name.starts_with("numpy._core.")) name.erase(6, 1);  // since numpy 2
      name.append(".").append(line());
      for (const char* const known : {kReconstruct, kArray, kType, kEncode})
        if (name == known) {
          push(Kind::Function).text = known;
          return true;
        }
      fail(opcode_, "the function " + name.substr(0, 80), kWhatIsRead);
    }
    if (code == 'R') {
      const PickleValue* const arguments = pop();
      const PickleValue* const function = pop();
      const auto& of = arguments->items;
      if (arguments->kind != Kind::Tuple || function->kind != Kind::Function)
        fail(opcode_, "a call of something that is no function", kWhatIsRead);
      if (function->text == kReconstruct && of.size() == 3 && is(*of[0], Kind::Function, kArray)) {
        push(Kind::Array);
      } else if (function->text == kType && of.size() == 3 && of[0]->kind == Kind::Text) {
        if (of[0]->text != "u1") fail(opcode_, "an array of " + std::string(of[0]->text.substr(0, 20)), kWhatIsRead);
        push(Kind::ByteType);
      } else if (function->text == kEncode && of.size() == 2 && of[0]->kind == Kind::Text &&
                 is(*of[1], Kind::Text, "latin1")) {
        text(owner_.decoded_.emplace_back(latin1(of[0]->text)));
      } else {
        fail(opcode_, "a call of " + std::string(function->text) + " with other values", kWhatIsRead);
      }
      return true;
    }
    if (code != 'b') return false;
    const PickleValue& state = *pop();
    PickleValue& value = *pop();
    if (state.kind != Kind::Tuple || (value.kind != Kind::Array && value.kind != Kind::ByteType))
      fail(opcode_, "the state of an object", kWhatIsRead);
    if (value.kind == Kind::Array) fill(value, state.items);
    stack_.push_back(&value);  // a type's state is its byte order, which bytes have none of
    return true;
  }

  // (version, shape, type, whether column by column, elements)
  void fill(PickleValue& array, const std::vector<const PickleValue*>& state) {
    const bool known = state.size() == 5 && state[1]->kind == Kind::Tuple && state[2]->kind == Kind::ByteType &&
                       state[3]->kind == Kind::Integer && state[3]->integer == 0 && state[4]->kind == Kind::Text;
    if (!known) fail(opcode_, "an array in another form", "a numpy array of uint8, row by row");
    array.shape.clear();
    array.text = state[4]->text;
    std::uint64_t left = array.text.size();
    bool whole = true;
    for (const PickleValue* const length : state[1]->items) {
      whole = whole && length->kind == Kind::Integer && length->integer > 0 &&
              left % static_cast<std::uint64_t>(length->integer) == 0;
      if (!whole) break;
      left /= static_cast<std::uint64_t>(length->integer);
      array.shape.push_back(length->integer);
    }
    if (!whole || left != 1)
      fail(opcode_, "an array of " + std::to_string(array.text.size()) + " bytes with another shape",
           "a byte for each element");
  }

  // Each character of UTF-8 as the byte of its number.
  std::string latin1(std::string_view utf8) const {
    std::string out;
    out.reserve(utf8.size());
    for (std::size_t i = 0; i < utf8.size(); ++i) {
      unsigned char byte = static_cast<unsigned char>(utf8[i]);
      if (byte >= 0x80) {
        const bool two = (byte == 0xc2 || byte == 0xc3) && i + 1 < utf8.size() && (utf8[i + 1] & 0xc0) == 0x80;
        if (!two) fail(opcode_, "a text that is not Latin-1", "bytes");
        byte = static_cast<unsigned char>((byte & 3) << 6 | (utf8[++i] & 0x3f));
      }
      out += static_cast<char>(byte);
    }
    return out;
  }

  static constexpr const char* kReconstruct = "numpy.core.multiarray._reconstruct";
  static constexpr const char* kArray = "numpy.ndarray";
  static constexpr const char* kType = "numpy.dtype";
  static constexpr const char* kEncode = "_codecs.encode";

  Pickle& owner_;
  std::string_view bytes_;
  std::size_t at_ = 0, opcode_ = 0;
  std::vector<PickleValue*> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, PickleValue*> memory_;
};

Pickle::Pickle(std::string_view bytes) { value_ = Machine(*this, bytes).run(); }

}  // namespace data
