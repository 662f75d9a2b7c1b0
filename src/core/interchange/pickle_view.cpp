// See pickle_view.h.
#include "interchange/pickle_view.h"

#include <set>

#include "base/check.h"
#include "base/printable.h"
#include "formats/files.h"
#include "formats/manifest.h"

namespace zero::interchange {

using pickle::Kind;
using pickle::Node;

namespace {

// A key of a dictionary as text: writers also use numbers.
std::string key_text(const Node& key) {
  if (key.kind == Kind::Text) return std::string(key.text);
  return pickle::Tree::text_of(key, 80);
}

}  // namespace

void PickleView::fail(const std::string& got, const std::string& expected) const {
  formats::fail_damaged(path_, base::printable(base::join(place_.empty() ? "the value" : place_, " (byte ",
                                                          node_->offset, ") is ", got, ", expected ", expected),
                                               base::Lines::Escape));
}

void PickleView::fail_type(const std::string& expected) const { fail(pickle::Tree::text_of(*node_, 60), expected); }

bool PickleView::is_dict() const {
  if (node_->kind == Kind::Dict) return true;
  return node_->is_call("collections.OrderedDict") && node_->arguments().empty() &&
         (node_->pairs || node_->items.size() == 2);
}

const Node* PickleView::found(const std::string& key) const {
  if (!is_dict()) fail_type("a dictionary with " + key);
  return node_->find(key);
}

bool PickleView::has(const std::string& key) const {
  const Node* const value = found(key);
  return value && value->kind != Kind::None;
}

PickleView PickleView::at(const std::string& key) const {
  const Node* const value = found(key);
  if (!value) fail("a dictionary without " + key, "one that has it");
  return inner(*value, "/" + key);
}

bool PickleView::has_attribute(const std::string& name) const {
  const Node* const value = node_->state ? node_->state->find(name) : nullptr;
  return value && value->kind != Kind::None;
}

PickleView PickleView::attribute(const std::string& name) const {
  const Node* const value = node_->state ? node_->state->find(name) : nullptr;
  if (!value) fail(pickle::Tree::text_of(*node_, 60), "an object with " + name);
  return inner(*value, "." + name);
}

std::vector<std::pair<std::string, PickleView>> PickleView::entries() const {
  if (!is_dict()) fail_type("a dictionary");
  std::vector<std::pair<std::string, PickleView>> all;
  std::set<std::string> seen;
  node_->each([&](const Node& key, const Node& value) {
    auto name = key_text(key);
    if (!seen.insert(name).second) fail("a dictionary that has " + name + " twice", "each key once");
    all.emplace_back(name, inner(value, "/" + name));
  });
  return all;
}

std::vector<PickleView> PickleView::items() const {
  if (node_->kind != Kind::List && node_->kind != Kind::Tuple) fail_type("a list");
  std::vector<PickleView> all;
  for (std::size_t i = 0; i < node_->items.size(); ++i) all.push_back(item(i));
  return all;
}

PickleView PickleView::item(std::size_t index) const {
  if ((node_->kind != Kind::List && node_->kind != Kind::Tuple) || index >= node_->items.size())
    fail_type("a list of more than " + std::to_string(index) + " values");
  return inner(*node_->items[index], "/" + std::to_string(index));
}

std::string PickleView::text() const {
  if (node_->kind != Kind::Text) fail_type("a text");
  return std::string(node_->text);
}

std::int64_t PickleView::count(std::int64_t most) const {
  if (node_->kind != Kind::Integer || node_->integer < 0 || node_->integer > most)
    fail_type("an integer from 0 to " + std::to_string(most));
  return node_->integer;
}

std::vector<std::int64_t> PickleView::shape() const {
  const bool size = node_->is_call("torch.Size") && node_->arguments().size() == 1;
  const PickleView list = size ? PickleView(*node_->arguments()[0], path_, place_) : *this;
  std::vector<std::int64_t> sizes;
  for (const auto& one : list.items()) sizes.push_back(one.count());
  // A product that does not overflow whatever the order: an empty dimension does not excuse huge ones.
  auto positive = sizes;
  std::erase(positive, 0);
  if (sizes.size() > 64 || formats::numel_of(positive) < 0) fail("a shape with too many elements", "fewer than 2^63");
  return sizes;
}

pickle::Tree parse_pickle(std::string_view bytes, const std::string& path) try {
  return pickle::Tree(bytes);
} catch (const pickle::Fault& fault) {
  formats::fail_damaged(path,
                        base::printable("has " + fault.got + ", expected " + fault.expected, base::Lines::Escape));
}

}  // namespace zero::interchange
