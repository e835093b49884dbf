// Reads the F32 and F16 tensors and the plain metadata of a GGUF file: as much as engine.cpp needs, and no more.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

struct Gguf {
  std::map<std::string, double> numbers;
  std::map<std::string, std::string> texts;
  std::map<std::string, std::vector<float>> tensors;

  explicit Gguf(const char *path) {
    FILE *file = std::fopen(path, "rb");
    if (!file) throw std::runtime_error(std::string(path) + ": cannot be opened");
    std::fseek(file, 0, SEEK_END);
    bytes.resize(static_cast<size_t>(std::ftell(file)));
    std::rewind(file);
    size_t whole = std::fread(bytes.data(), 1, bytes.size(), file);
    std::fclose(file);
    if (whole != bytes.size() || bytes.size() < 24 || std::memcmp(bytes.data(), "GGUF", 4))
      throw std::runtime_error(std::string(path) + ": is no GGUF file");
    at = 8;
    auto tensor_count = take<uint64_t>(), key_count = take<uint64_t>();
    for (uint64_t i = 0; i < key_count; i++) {
      std::string key = text();
      value(key, take<uint32_t>());
    }
    struct Info { std::string name; uint64_t count; uint32_t type; uint64_t offset; };
    std::vector<Info> infos;
    for (uint64_t i = 0; i < tensor_count; i++) {
      Info info{text(), 1, 0, 0};
      for (uint32_t axes = take<uint32_t>(); axes; axes--) info.count *= take<uint64_t>();
      info.type = take<uint32_t>();
      info.offset = take<uint64_t>();
      infos.push_back(info);
    }
    uint64_t align = numbers.count("general.alignment") ? static_cast<uint64_t>(numbers["general.alignment"]) : 32;
    uint64_t start = (at + align - 1) / align * align;
    for (const Info &info : infos) {
      if (info.type > 1) throw std::runtime_error(info.name + ": expected F32 or F16, found type " + std::to_string(info.type));
      std::vector<float> &out = tensors[info.name];
      at = start + info.offset;
      if (at + info.count * (info.type ? 2 : 4) > bytes.size()) throw std::runtime_error(info.name + ": ends behind the file");
      for (uint64_t i = 0; i < info.count; i++) out.push_back(info.type ? half(take<uint16_t>()) : take<float>());
    }
  }

 private:
  std::vector<char> bytes;
  size_t at = 0;

  template <typename T> T take() {
    T out;
    if (at + sizeof out > bytes.size()) throw std::runtime_error("the GGUF file ends too early");
    std::memcpy(&out, bytes.data() + at, sizeof out);
    at += sizeof out;
    return out;
  }

  std::string text() {
    auto length = take<uint64_t>();
    if (length > bytes.size() - at) throw std::runtime_error("the GGUF file ends too early");
    at += length;
    return std::string(bytes.data() + at - length, length);
  }

  void value(const std::string &key, uint32_t type) {
    switch (type) {
      case 0: numbers[key] = take<uint8_t>(); break;
      case 1: numbers[key] = take<int8_t>(); break;
      case 2: numbers[key] = take<uint16_t>(); break;
      case 3: numbers[key] = take<int16_t>(); break;
      case 4: numbers[key] = take<uint32_t>(); break;
      case 5: numbers[key] = take<int32_t>(); break;
      case 6: numbers[key] = take<float>(); break;
      case 7: numbers[key] = take<uint8_t>(); break;
      case 8: texts[key] = text(); break;
      case 9: {
        auto element = take<uint32_t>();
        for (auto count = take<uint64_t>(); count; count--) value("", element);
        break;
      }
      case 10: numbers[key] = static_cast<double>(take<uint64_t>()); break;
      case 11: numbers[key] = static_cast<double>(take<int64_t>()); break;
      case 12: numbers[key] = take<double>(); break;
      default: throw std::runtime_error(key + ": a value of unknown type");
    }
  }

  static float half(uint16_t bits) {
    uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023, out;
    float small = static_cast<float>(mantissa) / (1 << 24);
    if (!exponent) return sign ? -small : small;
    out = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
    float value;
    std::memcpy(&value, &out, sizeof value);
    return value;
  }
};
