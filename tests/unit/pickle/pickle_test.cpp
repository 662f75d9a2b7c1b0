// The reader of pickles: what it makes of every opcode, and what it refuses. Bytes as Python's pickletools describes
// them.
#include <gtest/gtest.h>

#include <string>

#include "pickle/pickle.h"

namespace pickle_test {
namespace {

using pickle::Kind;
using pickle::Limits;
using pickle::Tree;
using namespace std::string_literals;

std::string error_of(const std::string& bytes, const Limits& limits = {}) {
  try {
    const Tree tree(bytes, limits);
  } catch (const pickle::Fault& fault) {
    return fault.what();
  }
  return "";
}

// Without the "." at the end.
std::string text_of(const std::string& opcodes, int protocol = 4) {
  const std::string bytes = "\x80"s + static_cast<char>(protocol) + opcodes + ".";
  try {
    return Tree::text_of(Tree(bytes).root());
  } catch (const pickle::Fault& fault) {
    return fault.what();
  }
}

TEST(Pickle, ScalarsAndTexts) {
  EXPECT_EQ(text_of("N"), "None");
  EXPECT_EQ(text_of("(\x88\x89t"), "(True, False)");
  EXPECT_EQ(text_of("(K\xffM\xff\xffJ\xff\xff\xff\xff\x8a\0\x8a\x01\xfe\x8a\x02\0\x01t"s),
            "(255, 65535, -1, 0, -2, 256)");
  EXPECT_EQ(text_of("\x8a\x08\0\0\0\0\0\0\0\x80"s), "-9223372036854775808");
  EXPECT_EQ(text_of("\x8a\x09\0\0\0\0\0\0\0\0\x01"s), "an integer of 9 bytes");
  EXPECT_EQ(text_of("\x8b\x02\0\0\0\x01\x02"s), "513");
  EXPECT_EQ(text_of("G\x3f\xf8\0\0\0\0\0\0"s), "1.5");
  EXPECT_EQ(text_of("(\x8c\x01xX\x02\0\0\0yz\x8d\x01\0\0\0\0\0\0\0wt"s), "('x', 'yz', 'w')");
  EXPECT_EQ(text_of("(C\x01xB\x02\0\0\0yz\x8e\x01\0\0\0\0\0\0\0wt"s), "(1 bytes, 2 bytes, 1 bytes)");
}

TEST(Pickle, ContainersAndReferences) {
  EXPECT_EQ(text_of("](K\x01K\x02"
                    "eN"
                    "a"),
            "[1, 2, None]");
  EXPECT_EQ(text_of("}(K\x01NK\x02\x88u\x8c\x01xK\x03s"), "{1: None, 2: True, 'x': 3}");
  EXPECT_EQ(text_of("\x8f(K\x01K\x02\x90"), "{1, 2}");
  EXPECT_EQ(text_of("(K\x01K\x02l"), "[1, 2]");
  EXPECT_EQ(text_of("(K\x01K\x02"
                    "d"),
            "{1: 2}");
  EXPECT_EQ(text_of("N\x85K\x01K\x02\x86K\x03K\x04K\x05\x87\x87"), "((None), (1, 2), (3, 4, 5))");
  EXPECT_EQ(text_of("\x8c\x01x\x94h\0\x86"s), "('x', 'x')");
  EXPECT_EQ(text_of("\x8c\x01xq\x01h\x01\x86"), "('x', 'x')");
  EXPECT_EQ(text_of("\x8c\x01xr\x01\0\0\0j\x01\0\0\0\x86"s), "('x', 'x')");
  EXPECT_EQ(text_of("NN0"), "None");
  EXPECT_EQ(text_of("N(NN1"), "None");
  EXPECT_EQ(text_of("\x95\x01\0\0\0\0\0\0\0N"s), "None");
}

TEST(Pickle, CallsAreTreesOfNames) {
  EXPECT_EQ(text_of("cposix\nsystem\n\x8c\x02ls\x85R"), "posix.system('ls')");
  EXPECT_EQ(text_of("\x8c\x05posix\x8c\x06system\x93\x8c\x02ls\x85R"), "posix.system('ls')");
  EXPECT_EQ(text_of("ca\nB\n)\x81}\x8c\x01xK\x01s"
                    "b"),
            "a.B() with {'x': 1}");
  EXPECT_EQ(text_of("ca\nB\n)}\x92"), "copyreg.__newobj_ex__(a.B, (), {})");
  EXPECT_EQ(text_of("ccollections\nOrderedDict\n)R\x8c\x01xK\x01s"), "collections.OrderedDict(){'x': 1}");
  EXPECT_EQ(text_of("ccollections\ndeque\n)RK\x01"
                    "a"),
            "collections.deque()[1]");
  EXPECT_EQ(text_of("\x8c\x01kQ"), "persistent('k')");
}

TEST(Pickle, TheLastOfEqualKeysCounts) {
  const std::string bytes = "\x80\x02}(X\x01\0\0\0aK\x01X\x01\0\0\0bK\x02X\x01\0\0\0aK\x03u."s;
  const Tree tree(bytes);
  ASSERT_NE(tree.root().find("a"), nullptr);
  EXPECT_EQ(tree.root().find("a")->integer, 3);
  EXPECT_EQ(tree.root().find("c"), nullptr);
}

TEST(Pickle, WhatIsRefused) {
  const std::string whole = ", expected a whole pickle";
  EXPECT_EQ(error_of(""), "[pickle] got no pickle at byte 0, expected a pickle of protocol 2 to 5");
  EXPECT_EQ(error_of("(dp1\nS'data'\n."), "[pickle] got no pickle at byte 0, expected a pickle of protocol 2 to 5");
  for (const int protocol : {0, 1, 6, 255})
    EXPECT_EQ(error_of("\x80"s + static_cast<char>(protocol) + "N."),
              "[pickle] got protocol " + std::to_string(protocol) + " at byte 1, expected a pickle of protocol 2 to 5");
  // Opcodes of other protocols and purposes: INST, OBJ, INT, STRING, PERSID, extensions, out-of-band buffers, ...
  for (const char code : "ioIFLSVPgp2\x82\x83\x84\x91\x96\x97\x98"s)
    EXPECT_NE(error_of("\x80\x04("s + code + "\x01\n."), "") << static_cast<int>(code);
  EXPECT_EQ(error_of("\x80\x02U\x01x."), "[pickle] got opcode 0x55 at byte 2" + whole) << "Python 2's str";
  EXPECT_EQ(error_of("\x80\x02"
                     "a"),
            "[pickle] got an opcode without its value at byte 2" + whole);
  EXPECT_EQ(error_of("\x80\x02]N(a."), "[pickle] got an opcode without its value at byte 5" + whole);
  EXPECT_EQ(error_of("\x80\x02"
                     "e"),
            "[pickle] got an opcode without its mark at byte 2" + whole);
  EXPECT_EQ(error_of("\x80\x02}(K\x01u."), "[pickle] got a key without a value at byte 6" + whole);
  EXPECT_EQ(error_of("\x80\x02(K\x01"
                     "d."),
            "[pickle] got a key without a value at byte 5" + whole);
  EXPECT_EQ(error_of("\x80\x02]h\x05"
                     "a."),
            "[pickle] got a reference to nothing at byte 3" + whole);
  EXPECT_EQ(error_of("\x80\x02}K\x01"
                     "a."),
            "[pickle] got an opcode for a value of another kind at byte 5" + whole);
  EXPECT_EQ(error_of("\x80\x02"
                     "ca\nb\nNR."),
            "[pickle] got a call without arguments at byte 8" + whole);
  EXPECT_EQ(error_of("\x80\x02NN\x93."), "[pickle] got a function without a name at byte 4" + whole);
  EXPECT_EQ(error_of("\x80\x02NN."), "[pickle] got an end inside of a value at byte 4, expected one value");
  EXPECT_EQ(error_of("\x80\x02(."), "[pickle] got an end inside of a value at byte 3, expected one value");
  EXPECT_EQ(error_of("\x80\x02N.x"), "[pickle] got 1 bytes after the end at byte 4, expected the end of the file");
  EXPECT_EQ(error_of("\x80\x02X\xff\xff\xff\xffx."),
            "[pickle] got the end of the file at byte 9, expected more bytes: the file is incomplete");
  EXPECT_EQ(error_of("\x80\x02Nr\xff\xff\xff\xff."),
            "[pickle] got the number 4294967295 of a value at byte 3, expected numbers in order");
  EXPECT_EQ(error_of("\x80\x02\x8a\xff" + std::string(8, 'x')),
            "[pickle] got the end of the file at byte 12, expected more bytes: the file is incomplete");
  const std::string big((std::size_t{1} << 20) + 1, 'x');
  EXPECT_EQ(error_of("\x80\x02X\x01\0\x10\0"s + big + "."),
            "[pickle] got a text of 1048577 bytes at byte 2, expected at most 1048576");
  Limits limits;
  limits.bytes = 3;
  EXPECT_EQ(error_of("\x80\x02NN", limits), "[pickle] got 4 bytes at byte 3, expected at most 3");
  EXPECT_EQ(error_of("\x80\x02)" + std::string(1001, '\x85') + "."),
            "[pickle] got more than 1000 values in each other at byte 1003" + whole);
  EXPECT_EQ(error_of("\x80\x02" + std::string(1001, ']') + std::string(1001, 'a') + "."),
            "[pickle] got an opcode without its value at byte 2003" + whole);
  EXPECT_EQ(error_of("\x80\x02" + std::string(1002, ']') + std::string(1001, 'a') + "."),
            "[pickle] got more than 1000 values in each other at byte 2004" + whole);
  EXPECT_EQ(error_of("\x80\x02" + std::string(300000, ']')),
            "[pickle] got more than 262144 values side by side at byte 262146" + whole);
  limits = {};
  limits.opcodes = 10;
  EXPECT_EQ(error_of("\x80\x02" + std::string(20, 'N') + ".", limits),
            "[pickle] got more than 10 opcodes at byte 12" + whole);
}

// One byte of a file makes a node of 56.
TEST(Pickle, ValuesThatAreThrownAwayTakeNoMemory) {
  Limits limits;
  limits.values = 4;
  std::string bytes = "\x80\x02";
  for (int i = 0; i < 1000; ++i) bytes += "]0N}00(]NN1";
  const Tree tree(bytes + "K\x07.", limits);
  EXPECT_EQ(tree.root().integer, 7);
  EXPECT_EQ(error_of("\x80\x02(NNNNNl.", limits), "[pickle] got more than 4 values at byte 7, expected a whole pickle");
  // What the program can refer to again, or has put into another value, stays.
  EXPECT_EQ(text_of("]q\0000K\x07"
                    "0h\0"s),
            "[]");
  EXPECT_EQ(text_of("]q\0K\x07"
                    "ah\00000h\0"s),
            "[7]");
  EXPECT_EQ(text_of("(]K\x07"
                    "a1N"s),
            "None");
}

// A list that contains itself, and one that is 2^60 long when it is written out.
TEST(Pickle, TextsOfTreesAreShort) {
  EXPECT_EQ(text_of("]\x94h\0"
                    "a"s)
                .size(),
            133u);
  std::string doubled =
      "]N"
      "a\x94";
  for (int i = 0; i < 60; ++i) doubled += "0](h"s + static_cast<char>(i) + "h" + static_cast<char>(i) + "e\x94";
  EXPECT_EQ(text_of(doubled).size(), 163u);
}

}  // namespace
}  // namespace pickle_test
