// Writes pickles (protocol 2) of dictionaries, lists, numbers, texts and tensors, as torch.save does. The reader's side
// executes no more than torch._utils._rebuild_tensor_v2, collections.OrderedDict and the classes of begin_object().
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace zero::interchange {

class PickleWriter {
 public:
  PickleWriter();
  // Between begin_ and end_ come keys and values in turn, or items.
  void begin_dict();
  void begin_ordered_dict();
  void end_dict();
  void begin_list();
  void end_list();
  void text(const std::string& value);
  void integer(std::int64_t value);
  void real(double value);
  void boolean(bool value);
  void none();
  // A contiguous tensor at the beginning of record data/<record>. dtype: as in safetensors; ConfigError for one that
  // torch has no storage of.
  void tensor(const std::string& dtype, const std::vector<std::int64_t>& shape, std::size_t record);
  void global(const std::string& module, const std::string& name);
  // An instance that the reader's side makes of its class; names and values of its attributes come between.
  void begin_object(const std::string& module, const std::string& name);
  void end_object();
  void tuple(const std::vector<std::int64_t>& values);
  // The whole pickle.
  std::string finish();

 private:
  void mark();
  std::string out_;
};

}  // namespace zero::interchange
