// Strings of JSON documents: literal texts, and that a reader gets back what was written.
#include "base/json_write.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/printable.h"

namespace zero::base::json_write_test {
namespace {

std::string read_back(const std::string& document) { return nlohmann::json::parse(document).get<std::string>(); }

TEST(JsonWrite, QuotesAndBackslashes) {
  EXPECT_EQ(json_quote(""), R"("")");
  EXPECT_EQ(json_quote("plain text / <b>"), R"("plain text / <b>")");
  EXPECT_EQ(json_quote(R"(say "a\b")"), R"("say \"a\\b\"")");
}

TEST(JsonWrite, ControlCharacters) {
  EXPECT_EQ(json_quote("a\nb\tc"), R"("a\nb\tc")");
  EXPECT_EQ(json_quote("\r\b\f\x01\x1b[0m"), R"("\u000d\u0008\u000c\u0001\u001b[0m")");
  EXPECT_EQ(json_quote(std::string_view("\0x", 2)), R"("\u0000x")");
  EXPECT_EQ(json_quote("\x7f"), R"("\u007f")");
}

TEST(JsonWrite, WhatCommandsATerminalIsEscaped) {
  EXPECT_EQ(json_quote("\u0080\u009b\u009f\u00a0"), "\"\\u0080\\u009b\\u009f\u00a0\"");
  EXPECT_EQ(json_quote("\u061c\u200e\u2028\u202e\u2066"), R"("\u061c\u200e\u2028\u202e\u2066")");
}

TEST(JsonWrite, OtherCharactersStay) {
  EXPECT_EQ(json_quote("\u00fcber \ud55c\uad6d \U0001f600 e\u0301"), "\"\u00fcber \ud55c\uad6d \U0001f600 e\u0301\"");
}

TEST(JsonWrite, BytesThatAreNotUtf8AreReplacedOrKept) {
  EXPECT_EQ(json_quote("a\xff\u00e9"), "\"a\ufffd\u00e9\"");
  EXPECT_EQ(json_quote("\xe2\x82"), "\"\ufffd\ufffd\"") << "an end is missing";
  EXPECT_EQ(json_quote("\xc0\xaf"), "\"\ufffd\ufffd\"") << "overlong";
  EXPECT_EQ(json_quote("\xed\xa0\x80"), "\"\ufffd\ufffd\ufffd\"") << "a surrogate";
  EXPECT_EQ(json_quote("a\xff\"\n", NotUtf8::Keep), "\"a\xff\\\"\\n\"");
  EXPECT_EQ(json_quote("\u20ac\x80", NotUtf8::Keep), "\"\u20ac\x80\"");
}

TEST(JsonWrite, AReaderGetsTheTextBack) {
  std::string all;
  for (char c = 1; c < 0x7f; ++c) all += c;
  all += "\x7f\u0085\u00e9\u2028\u202e\U0001f600";
  EXPECT_EQ(read_back(json_quote(all)), all);
  EXPECT_EQ(json_quote(all, NotUtf8::Keep), json_quote(all));
  EXPECT_EQ(printable(json_quote(all), Lines::Escape), json_quote(all)) << "a terminal may show it as it is";
}

}  // namespace
}  // namespace zero::base::json_write_test
