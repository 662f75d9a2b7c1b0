// See pickled_array.h. The shapes of the calls are those of numpy's __reduce__ for arrays and types.
#include "apps/data/pickled_array.h"

namespace data {
namespace {

using pickle::fail_at;
using pickle::Kind;
using pickle::Node;

constexpr const char* kReadable = "numbers, texts, lists, dictionaries and numpy arrays of uint8";

// The module numpy.core is numpy._core since numpy 2.
bool is_reconstruct(const Node& node) {
  return node.is_call("numpy.core.multiarray._reconstruct") || node.is_call("numpy._core.multiarray._reconstruct");
}

// Each character of UTF-8 as the byte of its number.
std::string latin1(const Node& text) {
  std::string out;
  out.reserve(text.text.size());
  for (std::size_t i = 0; i < text.text.size(); ++i) {
    unsigned char byte = static_cast<unsigned char>(text.text[i]);
    if (byte >= 0x80) {
      const bool two = (byte == 0xc2 || byte == 0xc3) && i + 1 < text.text.size() && (text.text[i + 1] & 0xc0) == 0x80;
      if (!two) fail_at(text.offset, "a text that is not Latin-1", "bytes");
      byte = static_cast<unsigned char>((byte & 3) << 6 | (text.text[++i] & 0x3f));
    }
    out += static_cast<char>(byte);
  }
  return out;
}

bool is_bytes_type(const Node& node) {
  if (!node.is_call("numpy.dtype") || node.arguments().size() != 3 || !is_text(*node.arguments()[0])) return false;
  const auto type = node.arguments()[0]->text;
  if (type != "u1") fail_at(node.offset, "an array of " + std::string(type.substr(0, 20)), kReadable);
  return true;
}

}  // namespace

pickle::Limits limits_of_pictures() {
  pickle::Limits limits;
  limits.lowest_protocol = limits.highest_protocol = 2;
  limits.opcodes = 1'000'000;
  limits.stack = limits.opcodes;
  limits.text_bytes = limits.bytes;
  limits.python2_texts = true;
  limits.readable = kReadable;
  return limits;
}

const Node* text_in(const Node& node) {
  if (is_text(node)) return &node;
  const bool encoded = node.is_call("_codecs.encode") && node.arguments().size() == 2 &&
                       is_text(*node.arguments()[0]) && is_text(*node.arguments()[1]) &&
                       node.arguments()[1]->text == "latin1";
  return encoded ? node.arguments()[0] : nullptr;
}

const Node* find_by_text(const Node& dict, std::string_view key) {
  const Node* found = nullptr;
  dict.each([&](const Node& name, const Node& value) {
    if (const Node* const text = text_in(name); text && text->text == key) found = &value;
  });
  return found;
}

void read_array(const Node& node, PickledArray& array) {
  if (!is_reconstruct(node) || !node.state || node.state->kind != Kind::Tuple)
    fail_at(node.offset, pickle::Tree::text_of(node, 80), "a numpy array of uint8");
  // (version, shape, type, whether column by column, elements)
  const auto& state = node.state->items;
  const bool known = state.size() == 5 && state[1]->kind == Kind::Tuple && is_bytes_type(*state[2]) &&
                     (state[3]->kind == Kind::Bool || state[3]->kind == Kind::Integer) && state[3]->integer == 0;
  const Node* elements = known ? state[4] : nullptr;
  if (elements && is_text(*elements)) {
    array.bytes = elements->text;
  } else if (const Node* const text = elements ? text_in(*elements) : nullptr) {
    array.decoded = latin1(*text);
    array.bytes = array.decoded;
  } else {
    fail_at(node.offset, "an array in another form", "a numpy array of uint8, row by row");
  }
  array.shape.clear();
  std::uint64_t left = array.bytes.size();
  bool whole = true;
  for (const Node* const length : state[1]->items) {
    whole = whole && length->kind == Kind::Integer && length->integer > 0 &&
            left % static_cast<std::uint64_t>(length->integer) == 0;
    if (!whole) break;
    left /= static_cast<std::uint64_t>(length->integer);
    array.shape.push_back(length->integer);
  }
  if (!whole || left != 1)
    fail_at(node.offset, "an array of " + std::to_string(array.bytes.size()) + " bytes with another shape",
            "a byte for each element");
}

}  // namespace data
