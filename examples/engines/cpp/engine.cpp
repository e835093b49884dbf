// A Qwen2 engine with buffers of its own, and what it takes to dump them: `c++ -O2 -I../../../include engine.cpp`.
//
//     engine MODEL.gguf TOKEN,TOKEN,… [--decode N] [--dump FOLDER] [--bug NAME]
//
// Queries, keys and values lie head by head, (heads, positions, width), biases are added as the matmul is stored, and
// gate and up are one matrix of 2F columns: none of it is the layout of a dump, and none of it has to be changed for one.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iostream>

#include "gguf.h"
#include "parity_dump.h"

using Buffer = std::vector<float>;
static std::string bug;  // the mistake to make, for trying parity: see main()

struct Engine {
  Gguf file;
  int layers, width, heads, shared, hidden, vocabulary, size;  // `size` is a head's
  float eps, base;
  std::vector<Buffer> keys, values;  // of each layer, (shared, room, size)
  int cached = 0, room = 512;
  parity_dump *dump = nullptr;

  explicit Engine(const char *path) : file(path) {
    auto number = [&](const char *key) { return file.numbers.at("qwen2." + std::string(key)); };
    layers = int(number("block_count")), width = int(number("embedding_length"));
    heads = int(number("attention.head_count")), shared = int(number("attention.head_count_kv"));
    hidden = int(number("feed_forward_length")), size = width / heads;
    vocabulary = int(file.tensors.at("token_embd.weight").size()) / width;
    eps = float(number("attention.layer_norm_rms_epsilon")), base = float(number("rope.freq_base"));
    keys.assign(size_t(layers), Buffer(size_t(shared * room * size)));
    values = keys;
  }

  const Buffer &weight(int layer, const char *name) { return file.tensors.at((layer < 0 ? "" : "blk." + std::to_string(layer) + ".") + std::string(name)); }

  // (n, columns) of x (n, rows), plus a bias where there is one
  Buffer matmul(const Buffer &x, const Buffer &w, const Buffer *bias, int n) {
    size_t rows = x.size() / size_t(n), columns = w.size() / rows;
    Buffer out(size_t(n) * columns);
    for (size_t t = 0; t < size_t(n); t++)
      for (size_t c = 0; c < columns; c++) {
        float sum = 0;
        for (size_t r = 0; r < rows; r++) sum += x[t * rows + r] * w[c * rows + r];
        out[t * columns + c] = sum + (bias ? (*bias)[c] : 0);
      }
    return out;
  }

  Buffer norm(const Buffer &x, const Buffer &w, int n) {
    Buffer out(x.size());
    for (int t = 0; t < n; t++) {
      const float *row = &x[size_t(t * width)];
      float squares = 0;
      for (int i = 0; i < width; i++) squares += row[i] * row[i];
      float scale = 1 / std::sqrt(squares / float(width) + (bug == "norm-eps" ? 1e-5f : eps));
      for (int i = 0; i < width; i++) out[size_t(t * width + i)] = row[i] * scale * w[size_t(i)];
    }
    return out;
  }

  // (n, heads·size) -> (heads, n, size)
  Buffer by_head(const Buffer &x, int count, int n) {
    Buffer out(x.size());
    for (int t = 0; t < n; t++)
      for (int h = 0; h < count; h++) std::copy_n(&x[size_t((t * count + h) * size)], size, &out[size_t((h * n + t) * size)]);
    return out;
  }

  void rotate(Buffer &x, int count, int n) {
    for (int h = 0; h < count; h++)
      for (int t = 0; t < n; t++)
        for (int i = 0; i < size / 2; i++) {
          float position = float(cached + t - (bug == "decode-position" && cached ? 1 : 0));
          double angle = position * std::pow(double(bug == "rope-base" ? 10000.f : base), -2.0 * i / size);
          float c = float(std::cos(angle)), s = float(std::sin(angle));
          float *pair = &x[size_t((h * n + t) * size)], a = pair[i], b = pair[i + size / 2];
          pair[i] = a * c - b * s, pair[i + size / 2] = b * c + a * s;
        }
  }

  // what lies as (n, columns)
  void show(int layer, const char *name, const Buffer &x, int n) { parity_dump_tensor(dump, layer, name, PARITY_F32, x.data(), n, int64_t(x.size()) / n, 0); }
  // what lies as (heads, n, size) goes out as (n, heads, size)
  void show_heads(int layer, const char *name, const Buffer &x, int count, int n) {
    parity_dump_strided(dump, layer, name, PARITY_F32, x.data(), n, count, size, size, n * size, 1);
  }

  Buffer attention(int layer, const Buffer &x, int n) {
    Buffer none, q = by_head(matmul(x, weight(layer, "attn_q.weight"), &weight(layer, "attn_q.bias"), n), heads, n);
    Buffer k = by_head(matmul(x, weight(layer, "attn_k.weight"), &weight(layer, "attn_k.bias"), n), shared, n);
    Buffer v = by_head(matmul(x, weight(layer, "attn_v.weight"), bug == "no-v-bias" ? nullptr : &weight(layer, "attn_v.bias"), n), shared, n);
    show_heads(layer, "q", q, heads, n), show_heads(layer, "k", k, shared, n), show_heads(layer, "v", v, shared, n);
    rotate(q, heads, n), rotate(k, shared, n);
    show_heads(layer, "q_rope", q, heads, n), show_heads(layer, "k_rope", k, shared, n);
    Buffer &all_k = keys[size_t(layer)], &all_v = values[size_t(layer)], out(size_t(n * heads * size));
    for (int h = 0; h < shared; h++)
      for (int t = 0; t < n; t++) {
        std::copy_n(&k[size_t((h * n + t) * size)], size, &all_k[size_t((h * room + cached + t) * size)]);
        std::copy_n(&v[size_t((h * n + t) * size)], size, &all_v[size_t((h * room + cached + t) * size)]);
      }
    for (int h = 0; h < heads; h++)
      for (int t = 0; t < n; t++) {
        int group = bug == "kv-head" ? h % shared : h / (heads / shared), seen = cached + t + 1;
        Buffer p(static_cast<size_t>(seen));
        float top = -INFINITY, sum = 0;
        for (int s = 0; s < seen; s++) {
          float dot = 0;
          for (int i = 0; i < size; i++) dot += q[size_t((h * n + t) * size + i)] * all_k[size_t((group * room + s) * size + i)];
          p[size_t(s)] = dot / std::sqrt(float(size)), top = std::max(top, p[size_t(s)]);
        }
        for (float &e : p) e = std::exp(e - top), sum += e;
        for (int s = 0; s < seen; s++)
          for (int i = 0; i < size; i++) out[size_t((t * heads + h) * size + i)] += p[size_t(s)] / sum * all_v[size_t((group * room + s) * size + i)];
      }
    show(layer, "attn_ctx", out, n);
    return matmul(out, weight(layer, "attn_output.weight"), nullptr, n);
  }

  Buffer feed_forward(int layer, const Buffer &x, int n) {
    Buffer both = weight(layer, "ffn_gate.weight"), act(size_t(n * hidden));
    both.insert(both.end(), weight(layer, "ffn_up.weight").begin(), weight(layer, "ffn_up.weight").end());
    Buffer y = matmul(x, both, nullptr, n);  // (n, 2F): gate, then up
    parity_dump_strided(dump, layer, "ffn_gate", PARITY_F32, y.data(), n, hidden, 0, 2 * hidden, 1, 1);
    parity_dump_strided(dump, layer, "ffn_up", PARITY_F32, y.data() + hidden, n, hidden, 0, 2 * hidden, 1, 1);
    for (int t = 0; t < n; t++)
      for (int i = 0; i < hidden; i++) {
        float gate = y[size_t(t * 2 * hidden + i)], up = y[size_t((t * 2 + 1) * hidden + i)];
        act[size_t(t * hidden + i)] = up * (bug == "gelu" ? gate / 2 * (1 + std::erf(gate * float(M_SQRT1_2))) : gate / (1 + std::exp(-gate)));
      }
    show(layer, "ffn_act", act, n);
    return matmul(act, weight(layer, "ffn_down.weight"), nullptr, n);
  }

  // One forward pass over n tokens; returns the most likely next one.
  int32_t step(const std::vector<int32_t> &tokens) {
    int n = int(tokens.size());
    if (cached + n > room) throw std::runtime_error("the cache is full");
    parity_dump_begin_step(dump, tokens.data(), nullptr, tokens.size());
    Buffer x, table = weight(-1, "token_embd.weight");
    for (int32_t token : tokens) x.insert(x.end(), table.begin() + token * width, table.begin() + (token + 1) * width);
    show(-1, "embed", x, n);
    for (int layer = 0; layer < layers; layer++) {
      Buffer y = norm(x, weight(layer, "attn_norm.weight"), n);
      show(layer, "attn_norm", y, n);
      Buffer out = attention(layer, y, n);
      show(layer, "attn_out", out, n);
      for (size_t i = 0; i < x.size(); i++) x[i] += out[i];
      show(layer, "attn_residual", x, n);
      y = norm(x, weight(layer, "ffn_norm.weight"), n);
      show(layer, "ffn_norm", y, n);
      out = feed_forward(layer, y, n);
      show(layer, "ffn_out", out, n);
      for (size_t i = 0; i < x.size(); i++) x[i] += out[i];
      show(layer, "layer_out", x, n);
    }
    x = norm(x, weight(-1, "output_norm.weight"), n);
    show(-1, "final_norm", x, n);
    Buffer logits = matmul(x, file.tensors.count("output.weight") ? weight(-1, "output.weight") : table, nullptr, n);
    show(-1, "logits", logits, n);
    parity_dump_end_step(dump);
    cached += n;
    return int32_t(std::max_element(logits.end() - vocabulary, logits.end()) - (logits.end() - vocabulary));
  }
};

int main(int count, char **arguments) try {
  const std::vector<std::string> bugs = {"norm-eps", "rope-base", "decode-position", "no-v-bias", "kv-head", "gelu"};
  std::vector<int32_t> tokens;
  const char *folder = nullptr;
  int decode = 0;
  if (count < 3 || count % 2 == 0) throw std::runtime_error("usage: engine MODEL.gguf TOKEN,… [--decode N] [--dump FOLDER] [--bug NAME]");
  for (char *at = arguments[2]; *at; at += *at == ',') tokens.push_back(int32_t(std::strtol(at, &at, 10)));
  for (int i = 3; i < count; i += 2) {
    std::string option = arguments[i];
    if (option == "--decode") decode = std::atoi(arguments[i + 1]);
    else if (option == "--dump") folder = arguments[i + 1];
    else if (option == "--bug" && std::count(bugs.begin(), bugs.end(), arguments[i + 1])) bug = arguments[i + 1];
    else throw std::runtime_error(option + " " + arguments[i + 1] + ": is no option; bugs are norm-eps, rope-base, decode-position, no-v-bias, kv-head, gelu");
  }
  Engine engine(arguments[1]);
  if (folder) engine.dump = parity_dump_open(folder, "cpp-example", "1", "f32");
  int32_t next = engine.step(tokens);
  for (; decode--; next = engine.step({next})) std::cout << next << (decode ? "," : "\n");
  return parity_dump_close(engine.dump) ? 1 : 0;
} catch (const std::exception &error) {
  std::cerr << "engine: " << error.what() << "\n";
  return 2;
}
