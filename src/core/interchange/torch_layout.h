// The file that torch.save would write of a dictionary of tensors: a zip file with data.pkl and a record per tensor.
// torch.load(weights_only=True) opens it. No file access.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "interchange/weights_layout.h"
#include "interchange/zip_layout.h"

namespace zero::interchange {

struct TorchLayout {
  ZipLayout zip;
  std::vector<std::string> texts;               // contents of the records that are no tensor, by record; "" for tensors
  std::vector<std::size_t> records;             // by tensor
  OutFile file(const std::string& name) const;  // size, and the contents that are known now
  std::uint64_t offset(std::size_t tensor) const { return zip.records[records[tensor]].data; }
};

// pickle: data.pkl, in which tensor i is record i.
TorchLayout torch_layout(const std::string& pickle, const std::vector<std::uint64_t>& tensor_bytes);
// A whole file. contents: the bytes of tensor i.
std::string torch_file_text(const std::string& pickle, const std::vector<std::string>& contents);
// What is written last: headers and directory. crcs: CRC-32 of every tensor's bytes.
std::vector<std::pair<std::uint64_t, std::string>> torch_headers(const TorchLayout& layout,
                                                                 const std::vector<std::uint32_t>& crcs);

// data.pkl of an OrderedDict of name -> tensor. Tied tensors share a record.
std::string state_dict_pickle(const std::vector<OutTensor>& tensors, const std::map<std::string, std::string>& aliases);

}  // namespace zero::interchange
