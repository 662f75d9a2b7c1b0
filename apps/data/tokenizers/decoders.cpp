// See decoders.h.
#include "apps/data/tokenizers/decoders.h"

#include <array>

#include "apps/data/tokenizers/model.h"

namespace data {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  if (from.empty()) return;
  for (auto at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
}

std::string clean(std::string text) {
  static constexpr std::array<std::pair<const char*, const char*>, 11> kChanges{{{" .", "."},
                                                                                 {" ?", "?"},
                                                                                 {" !", "!"},
                                                                                 {" ,", ","},
                                                                                 {" ' ", "'"},
                                                                                 {" n't", "n't"},
                                                                                 {" 'm", "'m"},
                                                                                 {" do not", " don't"},
                                                                                 {" 's", "'s"},
                                                                                 {" 've", "'ve"},
                                                                                 {" 're", "'re"}}};
  for (const auto& [from, to] : kChanges) replace_all(text, from, to);
  return text;
}

// The byte that a token such as <0x0A> stands for; -1 for another token.
int byte_of(const std::string& token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  int byte = 0;
  for (const char c : token.substr(3, 2)) {
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                             : -1;
    if (digit < 0) return -1;
    byte = byte * 16 + digit;
  }
  return byte;
}

}  // namespace

std::string repaired_utf8(std::string_view bytes) {
  std::string text;
  while (!bytes.empty()) {
    const auto valid = invalid_utf8(bytes);
    text += bytes.substr(0, valid);
    bytes.remove_prefix(valid);
    if (bytes.empty()) break;
    text += kReplacement;
    // The part of a character that is right so far.
    const auto lead = static_cast<unsigned char>(bytes[0]);
    const std::size_t whole = lead >= 0xf0 && lead <= 0xf4  ? 4
                              : lead >= 0xe0 && lead < 0xf0 ? 3
                              : lead >= 0xc2 && lead < 0xe0 ? 2
                                                            : 1;
    std::size_t part = 1;
    for (; part < whole && part < bytes.size(); ++part) {
      const auto byte = static_cast<unsigned char>(bytes[part]);
      unsigned least = 0x80, most = 0xbf;
      if (part == 1 && lead == 0xe0) least = 0xa0;
      if (part == 1 && lead == 0xed) most = 0x9f;
      if (part == 1 && lead == 0xf0) least = 0x90;
      if (part == 1 && lead == 0xf4) most = 0x8f;
      if (byte < least || byte > most) break;
    }
    bytes.remove_prefix(part);
  }
  return text;
}

Decoder decode_byte_level() {
  return [](std::vector<std::string>& tokens) {
    std::string bytes;
    for (const auto& token : tokens) bytes += bytes_of_characters(token).value_or(token);
    tokens = {repaired_utf8(bytes)};
  };
}

Decoder decode_wordpiece(const std::string& prefix, bool cleanup) {
  return [=](std::vector<std::string>& tokens) {
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      auto& token = tokens[i];
      if (i > 0) token = token.starts_with(prefix) ? token.substr(prefix.size()) : " " + token;
      if (cleanup) token = clean(token);
    }
  };
}

Decoder decode_metaspace(const std::string& replacement, bool first_loses_it) {
  return [=](std::vector<std::string>& tokens) {
    for (std::size_t i = 0; i < tokens.size(); ++i)
      replace_all(tokens[i], replacement, i == 0 && first_loses_it ? "" : " ");
  };
}

Decoder decode_bpe(const std::string& suffix) {
  return [=](std::vector<std::string>& tokens) {
    for (std::size_t i = 0; i < tokens.size(); ++i) replace_all(tokens[i], suffix, i + 1 == tokens.size() ? "" : " ");
  };
}

Decoder decode_byte_fallback() {
  return [](std::vector<std::string>& tokens) {
    std::vector<std::string> result;
    std::string bytes;
    const auto flush = [&] {
      if (bytes.empty()) return;
      if (invalid_utf8(bytes) == bytes.size())
        result.push_back(bytes);
      else
        result.insert(result.end(), bytes.size(), std::string(kReplacement));
      bytes.clear();
    };
    for (auto& token : tokens) {
      if (const int byte = byte_of(token); byte >= 0) {
        bytes.push_back(static_cast<char>(byte));
      } else {
        flush();
        result.push_back(std::move(token));
      }
    }
    flush();
    tokens = std::move(result);
  };
}

Decoder decode_fused() {
  return [](std::vector<std::string>& tokens) {
    std::string all;
    for (const auto& token : tokens) all += token;
    tokens = {all};
  };
}

Decoder decode_stripped(const std::string& content, std::int64_t start, std::int64_t stop) {
  return [=](std::vector<std::string>& tokens) {
    for (auto& token : tokens) {
      std::string_view rest = token;
      for (auto i = start; i > 0 && rest.starts_with(content); --i) rest.remove_prefix(content.size());
      for (auto i = stop; i > 0 && rest.ends_with(content); --i) rest.remove_suffix(content.size());
      token = std::string(rest);
    }
  };
}

Decoder decode_replaced(const Pattern& pattern, const std::string& content) {
  return [=](std::vector<std::string>& tokens) {
    for (auto& token : tokens) {
      std::string changed;
      for (const auto& part : pattern.parts(token))
        changed += part.match ? content : token.substr(part.begin, part.end - part.begin);
      token = std::move(changed);
    }
  };
}

}  // namespace data
