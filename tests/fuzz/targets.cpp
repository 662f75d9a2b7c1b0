// See targets.h.
#include "fuzz/targets.h"

#include <zero/options.h>

#include <cstring>
#include <iterator>
#include <string>

#include "formats/json.h"
#include "formats/manifest.h"
#include "formats/safetensors.h"
#include "fuzz/accepts.h"
#include "observe/event_file.h"
#include "tools/launch/remote/hostfile.h"
#include "tools/launch/remote/protocol.h"

namespace zero::test {
namespace {

void configuration(std::string_view bytes) {
  Options options;
  if (!accepts([&] { options = Options::from_json(bytes, "f"); })) return;
  // Every effective value, given one by one, makes the same configuration.
  (void)options.explain(4, true);
  std::vector<Setting> values;
  for (const auto& [key, value] : options.effective())
    if (!value.empty() && value != "null") values.push_back({key, value});
  Options again;
  if (accepts([&] { again = Options::from_json("{}", "f", values); }))
    require(again.digest() == options.digest(), "the values of a configuration make another one");
}

void manifest(std::string_view bytes) {
  formats::Manifest m;
  if (!accepts([&] { m = formats::parse_manifest(std::string(bytes), "f"); })) return;
  if (m.format == 1) return;  // is not written any more
  std::string text;
  if (!accepts([&] { text = formats::manifest_text(m); })) return;
  require(formats::manifest_text(formats::parse_manifest(text, "f")) == text, "a manifest does not come back");
}

void tensors(std::string_view bytes) {
  std::vector<formats::Tensor> list;
  if (!accepts([&] { list = formats::parse_tensors(bytes, "f"); })) return;
  const auto text = formats::tensors_text(list);
  require(formats::tensors_text(formats::parse_tensors(text, "f")) == text, "a list of tensors does not come back");
}

void sums(std::string_view bytes) {
  (void)accepts([&] { (void)formats::parse_sums(bytes, "f"); });
  formats::Latest latest;
  if (accepts([&] { latest = formats::parse_latest(bytes, "f"); }))
    require(formats::latest_text(latest) == bytes, "the pointer has two spellings");
}

// 8 bytes: how much data follows the header.
void safetensors(std::string_view bytes) {
  if (bytes.size() < 8) return;
  std::uint64_t data = 0;
  std::memcpy(&data, bytes.data(), 8);
  formats::Header header;
  if (!accepts([&] { header = formats::parse_header(bytes.substr(8), data, "f"); })) return;
  const auto text = formats::header_bytes(header, 8);
  const auto again = formats::parse_header(std::string_view(text).substr(8), data, "f");
  require(again.tensors.size() == header.tensors.size() && again.metadata == header.metadata,
          "a header does not come back");
  for (std::size_t i = 0; i < again.tensors.size(); ++i)
    require(again.tensors[i].key == header.tensors[i].key && again.tensors[i].begin == header.tensors[i].begin &&
                again.tensors[i].end == header.tensors[i].end,
            "a tensor of a header does not come back");
}

void hostfile(std::string_view bytes) {
  std::vector<launch::Host> hosts;
  if (!accepts([&] { hosts = launch::parse_hostfile(bytes, "f"); })) return;
  std::string text;
  for (const auto& host : hosts) text += host.name + " slots=" + std::to_string(host.slots.size()) + "\n";
  const auto again = launch::parse_hostfile(text, "f");
  require(again.size() == hosts.size(), "a hostfile does not come back");
  // The rest of the bytes as a filter.
  (void)accepts([&] { (void)launch::include_hosts(hosts, bytes.substr(0, 200)); });
  (void)accepts([&] { (void)launch::exclude_hosts(hosts, bytes.substr(0, 200)); });
}

void wire(std::string_view bytes) {
  launch::FrameReader reader;
  reader.feed(bytes);
  (void)accepts([&] {
    for (launch::Frame frame; reader.next(frame);) {
      (void)accepts([&] {
        launch::Unpacker in(frame.payload);
        (void)launch::unpack_plan(in);
      });
      (void)accepts([&] {
        launch::Unpacker in(frame.payload);
        (void)launch::unpack_page(in);
      });
      (void)accepts([&] {
        launch::Unpacker in(frame.payload);
        (void)in.small();
        (void)in.text();
        (void)in.real();
        (void)in.texts();
        (void)in.numbers();
      });
      const auto text = launch::frame_bytes(frame.kind, frame.payload);
      launch::FrameReader again;
      again.feed(text);
      launch::Frame same;
      require(again.next(same) && same.kind == frame.kind && same.payload == frame.payload,
              "a frame does not come back");
    }
  });
}

// What is written for TensorBoard: tags are any text. A frame is taken apart as its readers do.
void tensorboard(std::string_view bytes) {
  if (bytes.size() < 16) return;
  double value = 0, time = 0;
  std::memcpy(&value, bytes.data(), 8);
  std::memcpy(&time, bytes.data() + 8, 8);
  const auto event = observe::scalar_event(time, static_cast<std::int64_t>(bytes.size()),
                                           {{std::string(bytes.substr(16)), value}, {"other", 1}});
  const auto frame = observe::record_frame(event);
  const auto number = [&](std::size_t at, std::size_t count) {
    std::uint64_t result = 0;
    std::memcpy(&result, frame.data() + at, count);
    return result;
  };
  const auto masked = [](std::string_view text) {
    const auto crc = observe::crc32c(text);
    return static_cast<std::uint32_t>((crc >> 15 | crc << 17) + 0xa282ead8u);
  };
  require(frame.size() == event.size() + 16 && number(0, 8) == event.size(), "a frame has another length");
  require(number(8, 4) == masked(std::string_view(frame).substr(0, 8)) && number(12 + event.size(), 4) == masked(event),
          "a frame has another checksum");
  // Fields of a protocol buffer: they end where the message ends.
  std::size_t at = 0;
  const auto varint = [&] {
    std::uint64_t result = 0;
    for (int shift = 0;; shift += 7) {
      require(at < event.size() && shift < 70, "a number of an event does not end");
      const auto byte = static_cast<unsigned char>(event[at++]);
      if (shift < 64) result |= static_cast<std::uint64_t>(byte & 127) << shift;
      if (byte < 128) return result;
    }
  };
  while (at < event.size()) {
    const auto kind = varint() & 7;
    if (kind == 0)
      (void)varint();
    else if (kind == 1)
      at += 8;
    else if (kind == 5)
      at += 4;
    else
      require(kind == 2, "an event has a field of an unknown kind");
    if (kind == 2) {
      const auto length = varint();
      require(length <= event.size() - at, "a field of an event is longer than the event");
      at += length;
    }
    require(at <= event.size(), "an event ends within a field");
  }
}

constexpr FuzzTarget kTargets[] = {
    {"config", configuration},    {"manifest", manifest}, {"tensors", tensors}, {"sums", sums},
    {"safetensors", safetensors}, {"hostfile", hostfile}, {"wire", wire},       {"tensorboard", tensorboard}};

}  // namespace

std::vector<FuzzTarget> fuzz_targets() {
  std::vector<FuzzTarget> all(std::begin(kTargets), std::end(kTargets));
  for (const auto& others : {interchange_fuzz_targets(), checkpoint_fuzz_targets(), data_fuzz_targets()})
    all.insert(all.end(), others.begin(), others.end());
  return all;
}

}  // namespace zero::test
