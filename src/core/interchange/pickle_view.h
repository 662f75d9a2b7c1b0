// Values of a pickled tree as a reader wants them. Every getter throws IoError (kCheckpoint) with the file, the value's
// place in the tree and its byte, if the value is missing, has another type or is out of range.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "pickle/pickle.h"

namespace zero::interchange {

class PickleView {
 public:
  // `path`: of the file, with the record: "model.pt: data.pkl".
  PickleView(const pickle::Node& node, std::string path, std::string place = "")
      : node_(&node), path_(std::move(path)), place_(std::move(place)) {}

  const pickle::Node& node() const { return *node_; }
  const std::string& path() const { return path_; }
  const std::string& place() const { return place_; }
  [[noreturn]] void fail(const std::string& got, const std::string& expected) const;
  // Of a value that is something else: names what it is.
  [[noreturn]] void fail_type(const std::string& expected) const;

  bool is_none() const { return node_->is(pickle::Kind::None); }
  // A dictionary or collections.OrderedDict.
  bool is_dict() const;
  // An instance of the class, by what it is called with: "module.Name".
  bool is_object(const char* name) const { return node_->is_call(name); }
  // Whether a dictionary has the key with a value that is not None.
  bool has(const std::string& key) const;
  PickleView at(const std::string& key) const;  // of a dictionary
  // Of an object that was built from a dictionary.
  PickleView attribute(const std::string& name) const;
  bool has_attribute(const std::string& name) const;                // and it is not None
  std::vector<std::pair<std::string, PickleView>> entries() const;  // of a dictionary with text keys, each once
  std::vector<PickleView> items() const;                            // of a list or tuple
  PickleView item(std::size_t index) const;
  std::string text() const;
  std::int64_t count(std::int64_t most = INT64_MAX) const;  // a non-negative integer
  std::vector<std::int64_t> shape() const;                  // torch.Size, or a list or tuple of counts
  std::string line() const { return pickle::Tree::text_of(*node_); }

 private:
  PickleView inner(const pickle::Node& node, const std::string& name) const { return {node, path_, place_ + name}; }
  const pickle::Node* found(const std::string& key) const;

  const pickle::Node* node_;
  std::string path_, place_;
};

// The tree of bytes that outlive it. Throws IoError (kCheckpoint) with `path`.
pickle::Tree parse_pickle(std::string_view bytes, const std::string& path);

}  // namespace zero::interchange
