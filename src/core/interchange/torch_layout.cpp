// See torch_layout.h.
#include "interchange/torch_layout.h"

#include "base/check.h"
#include "interchange/crc32.h"
#include "interchange/pickle_writer.h"

namespace zero::interchange {

TorchLayout torch_layout(const std::string& pickle, const std::vector<std::uint64_t>& tensor_bytes) {
  TorchLayout layout;
  std::vector<std::pair<std::string, std::uint64_t>> records;
  const auto text = [&](const std::string& name, const std::string& content) {
    records.emplace_back("archive/" + name, content.size());
    layout.texts.push_back(content);
  };
  text("data.pkl", pickle);
  text("byteorder", "little");
  for (std::size_t t = 0; t < tensor_bytes.size(); ++t) {
    layout.records.push_back(records.size());
    records.emplace_back("archive/data/" + std::to_string(t), tensor_bytes[t]);
    layout.texts.emplace_back();
  }
  text("version", "3\n");
  layout.zip = zip_layout(records);
  return layout;
}

OutFile TorchLayout::file(const std::string& name) const {
  OutFile file{name, zip.bytes, {}};
  for (std::size_t r = 0; r < texts.size(); ++r)
    if (!texts[r].empty()) file.fixed.emplace_back(zip.records[r].data, texts[r]);
  return file;
}

std::vector<std::pair<std::uint64_t, std::string>> torch_headers(const TorchLayout& layout,
                                                                 const std::vector<std::uint32_t>& crcs) {
  ZERO_CHECK(crcs.size() == layout.records.size(), "CRCs of ", crcs.size(), " tensors");
  std::vector<std::uint32_t> all;
  for (const auto& text : layout.texts) all.push_back(crc32(0, text.data(), text.size()));
  for (std::size_t t = 0; t < crcs.size(); ++t) all[layout.records[t]] = crcs[t];
  return zip_headers(layout.zip, all);
}

std::string torch_file_text(const std::string& pickle, const std::vector<std::string>& contents) {
  std::vector<std::uint64_t> bytes;
  std::vector<std::uint32_t> crcs;
  for (const auto& content : contents) {
    bytes.push_back(content.size());
    crcs.push_back(crc32(0, content.data(), content.size()));
  }
  const auto layout = torch_layout(pickle, bytes);
  std::string text(layout.zip.bytes, '\0');
  auto parts = layout.file("").fixed;
  for (auto& header : torch_headers(layout, crcs)) parts.push_back(std::move(header));
  for (std::size_t t = 0; t < contents.size(); ++t) parts.emplace_back(layout.offset(t), contents[t]);
  for (const auto& [offset, part] : parts) text.replace(offset, part.size(), part);
  return text;
}

std::string state_dict_pickle(const std::vector<OutTensor>& tensors,
                              const std::map<std::string, std::string>& aliases) {
  std::map<std::string, std::size_t> records;
  for (std::size_t t = 0; t < tensors.size(); ++t) records[tensors[t].name] = t;
  for (const auto& [alias, stored] : aliases)
    if (const auto found = records.find(stored); found != records.end()) records.emplace(alias, found->second);
  PickleWriter pickle;
  pickle.begin_ordered_dict();
  for (const auto& [name, record] : records) {
    pickle.text(name);
    pickle.tensor(tensors[record].dtype, tensors[record].shape, record);
  }
  pickle.end_dict();
  return pickle.finish();
}

}  // namespace zero::interchange
