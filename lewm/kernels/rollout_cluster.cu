// A whole planning rollout of some hundred candidates in one kernel; rollout_cluster.py explains and launches it.
//
// A cluster of 8 thread blocks takes a few candidates through all steps and layers. Each block holds an eighth of every
// layer: two heads, and 256 of the hidden units. It streams its weights through a ring of shared-memory stages, in the
// order in which they are used, and multiplies them with tokens that all eight blocks have a copy of. The eight partial
// results of a sub-layer are added up row by row: a warp of some block owns each token, keeps its residual stream in
// registers, reads the row from all eight, updates and normalises it, and sends the result to all eight.
//
// No headers are included, because compiling at run time would have to find them.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;  // as bits

constexpr int BLOCKS = 8;  // of a cluster
constexpr int WARPS = 8;
constexpr int WIDTH = 192;
constexpr int HISTORY = 3;
constexpr int LAYERS = 6;
constexpr int INNER = 128;   // of the attention, in one block: two heads of 64
constexpr int HIDDEN = 256;  // of the MLP, in one block
constexpr int MODULATION = LAYERS * 6 * WIDTH;

// Biases, float: for each layer the queries' (INNER), the attention's output (WIDTH), hidden (HIDDEN), the MLP's output
// (WIDTH); then the projector's hidden and output.
constexpr int LAYER_BIASES = INNER + WIDTH + HIDDEN + WIDTH;
constexpr int BIASES = LAYERS * LAYER_BIASES + HIDDEN + WIDTH;

// Weights arrive in chunks of a few slices of 16 rows of a matrix. A layer has 16: 6 for the queries, keys and values,
// 2 for the attention's output, 4 for each of the MLP's two products. The projector at the end is another MLP.
constexpr int CHUNK = 24576;  // bytes
constexpr int CHUNKS_PER_STEP = 16 * LAYERS + 8;

// Bytes from row to row of the matrices in shared memory: 16 more than a multiple of 128, so that eight rows fall into
// different banks.
constexpr int TOKEN_STRIDE = 2 * WIDTH + 16;     // normalised tokens, bf16
constexpr int WIDE_STRIDE = 2 * 3 * INNER + 16;  // queries, keys and values, bf16; later the partial results
constexpr int MIXED_STRIDE = 2 * INNER + 16;     // what attention read, bf16
constexpr int HIDDEN_STRIDE = 2 * HIDDEN + 16;   // hidden units, bf16; in the same place as the above

// Shared memory holds these matrices and then the ring of weights, which gets what is left of 227 KB: more if the step
// has one token for each candidate (at most 32 rows) than if it has several (at most 64). The ring's barriers are in
// the 16 bytes after each row of tokens.
constexpr int MAX_STAGES = 7;
__device__ int stages_for(int rows) { return rows == 32 ? MAX_STAGES : 5; }
__device__ u32 wide_at(int rows) { return rows * TOKEN_STRIDE; }
__device__ u32 hidden_at(int rows) { return rows * (TOKEN_STRIDE + WIDE_STRIDE); }
__device__ u32 ring_at(int rows) { return rows * (TOKEN_STRIDE + WIDE_STRIDE + HIDDEN_STRIDE); }

struct Arguments {
    const float* context;        // (environments, frames, WIDTH): embeddings of the real frames
    const bf16* shared_mod;      // (environments, frames - 1, MODULATION): of the executed actions
    const bf16* own_mod;         // (candidates, horizon, MODULATION): of the planned actions
    const float* positions;      // (HISTORY, WIDTH)
    const bf16* weights;         // (BLOCKS, CHUNKS_PER_STEP, CHUNK / 2)
    const float* biases;         // (BLOCKS, BIASES)
    bf16* kept;                  // (clusters, BLOCKS, LAYERS, HISTORY - 1, per_cluster, 2 * INNER): keys and values
    float* out;                  // (candidates, horizon, WIDTH): predictions
    int candidates, per_cluster, samples, frames, horizon;
};

// -- instructions that C++ has no words for ---------------------------------------------------------------------------

__device__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ u32 block_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }

__device__ u32 in_block(u32 address, u32 rank) {
    u32 r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
    return r;
}

__device__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}

__device__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" :: "r"(barrier), "r"(parity) : "memory");
}

__device__ void copy_chunk(u32 target, const void* source, u32 barrier) {
    asm volatile("{ .reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s, [%0], %1; }"
                 :: "r"(barrier), "r"(CHUNK) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(target), "l"(source), "r"(CHUNK), "r"(barrier) : "memory");
}

__device__ void load_matrix(u32 (&a)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
}

// A slice of 16 rows of a warp's columns; rollout_cluster.py puts them into the order that tensor cores want.
template <int COLUMNS>
__device__ void load_weights(u32 (&w)[COLUMNS][2], u32 at) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c + 1 < COLUMNS; c += 2)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[c][0]), "=r"(w[c][1]), "=r"(w[c + 1][0]), "=r"(w[c + 1][1])
                     : "r"(at + c * 256 + lane * 16) : "memory");
    if (COLUMNS % 2)
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[COLUMNS - 1][0]), "=r"(w[COLUMNS - 1][1])
                     : "r"(at + (COLUMNS - 1) * 256 + lane * 8) : "memory");
}

__device__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ void load_remote(u32 (&pairs)[3], u32 four, u32 two) {
    asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];" : "=r"(pairs[0]), "=r"(pairs[1]) : "r"(four) : "memory");
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(pairs[2]) : "r"(two) : "memory");
}

__device__ void store_remote(u32 four, u32 two, const u32 (&pairs)[3]) {
    asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" :: "r"(four), "r"(pairs[0]), "r"(pairs[1]) : "memory");
    asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(two), "r"(pairs[2]) : "memory");
}

__device__ float load_uncached(const float* p) {  // what another block of the cluster may have written
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}

// Bring what attention will read, bf16, nearer.
__device__ void prefetch(const bf16* p, int count) {
    for (int i = threadIdx.x * 64; i < count; i += WARPS * 32 * 64)
        asm volatile("prefetch.global.L1 [%0];" :: "l"(p + i));
}

__device__ u32 pack(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// In float16, which is three bits more exact than bf16: for partial results, which do not become large.
__device__ u32 pack_half(float low, float high) {
    u32 r;
    low = fminf(fmaxf(low, -65504.0f), 65504.0f), high = fminf(fmaxf(high, -65504.0f), 65504.0f);
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ float2 unpack_half(u32 pair) {
    float2 v;
    asm("{ .reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(v.x), "=f"(v.y) : "r"(pair));
    return v;
}

__device__ float2 unpack(u32 pair) { return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)}; }

__device__ float gelu(float x) {
    // The tanh approximation, its two coefficients refitted for the smallest largest error (2.7e-4).
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(x * (0.80015708f + 0.03470089f * x * x)));
    return 0.5f * x * (1.0f + t);
}

// -- weights ----------------------------------------------------------------------------------------------------------

// The ring of weight chunks. Whichever warp is the last to be done with a stage has it refilled.
struct Ring {
    u32 memory;          // of the block
    const char* source;  // this block's weights of one step, needed again at each
    u32 chunks;          // where the stages begin
    int stages, stage, parity;
    int ahead, to_fill;  // the chunk that the stage in use will hold next, and how many are still to come

    __device__ u32 full(int i) const { return memory + i * TOKEN_STRIDE + 2 * WIDTH; }
    __device__ u32 done(int i) const { return full(i) + 8; }  // how many warps are done with it

    // Start over, for a number of steps, with the stages that ``rows`` leave room for. All of the block's threads.
    __device__ void start(int rows, int steps) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        chunks = memory + ring_at(rows), stages = stages_for(rows), stage = 0, parity = 0;
        ahead = stages, to_fill = steps * CHUNKS_PER_STEP - stages;
        if (threadIdx.x == 0) {
            for (int i = 0; i < stages; i++) {
                barrier_init(full(i), 1);
                asm volatile("st.shared.u32 [%0], 0;" :: "r"(done(i)) : "memory");
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            for (int i = 0; i < stages; i++) fill(i, i);
        }
        __syncthreads();
    }

    // All chunks have been used: forget the barriers. All of the block's threads.
    __device__ void stop() const {
        __syncthreads();
        if (threadIdx.x < stages)
            asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(full(threadIdx.x)) : "memory");
    }

    __device__ u32 wait() const {
        barrier_wait(full(stage), parity);
        return chunks + stage * CHUNK;
    }

    __device__ void release() {
        __syncwarp();
        if (threadIdx.x % 32 == 0 && to_fill > 0 && count() == WARPS - 1) {
            asm volatile("st.shared.u32 [%0], 0;" :: "r"(done(stage)) : "memory");
            fill(stage, ahead);
        }
        __syncwarp();
        to_fill--;
        if (++stage == stages) stage = 0, parity ^= 1;
        if (++ahead == CHUNKS_PER_STEP) ahead = 0;
    }

    __device__ u32 count() const {  // how many warps were done with the stage before this one
        u32 before;
        asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;" : "=r"(before) : "r"(done(stage)) : "memory");
        return before;
    }

    __device__ void fill(int i, int chunk) const {
        copy_chunk(chunks + i * CHUNK, source + (u64)chunk * CHUNK, full(i));
    }
};

enum Product { QKV, ATTENTION_OUT, MLP_HIDDEN, MLP_OUT };

// Tokens (16 * TILES, 16 * SLICES * CHUNKS) times a weight, of which each warp has 8 * COLUMNS columns.
template <Product PRODUCT, int COLUMNS, int SLICES, int CHUNKS, int TILES>
__device__ void product(Ring& ring, u32 left, int left_stride, u32 right, int right_stride, const float* bias) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_column = warp * COLUMNS * 8 + lane % 4 * 2;
    float2 add[COLUMNS] = {};
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
        if (PRODUCT == MLP_HIDDEN || (PRODUCT == QKV && first_column + 8 * c < INNER))
            add[c] = __ldg((const float2*)(bias + first_column + 8 * c));
    float sum[TILES][COLUMNS][4] = {};
    const u32 left_at = left + lane % 16 * left_stride + lane / 16 * 16;
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const u32 chunk_at = ring.wait() + warp * COLUMNS * 256;
#pragma unroll
        for (int slice = 0; slice < SLICES; slice++) {
            u32 w[COLUMNS][2];
            load_weights(w, chunk_at + slice * COLUMNS * 2048);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                u32 x[4];
                load_matrix(x, left_at + tile * 16 * left_stride + (chunk * SLICES + slice) * 32);
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) multiply(sum[tile][c], x, w[c][0], w[c][1]);
            }
        }
        ring.release();
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float x = sum[tile][c][2 * half] + add[c].x, y = sum[tile][c][2 * half + 1] + add[c].y;
                if (PRODUCT == MLP_HIDDEN) x = gelu(x), y = gelu(y);
                const u32 pair = PRODUCT == ATTENTION_OUT || PRODUCT == MLP_OUT ? pack_half(x, y) : pack(x, y);
                const u32 at = right + (tile * 16 + half * 8 + lane / 4) * right_stride + (first_column + 8 * c) * 2;
                asm volatile("st.shared.u32 [%0], %1;" :: "r"(at), "r"(pair) : "memory");
            }
}

template <Product PRODUCT, int COLUMNS, int SLICES, int CHUNKS>
__device__ void product(int rows, Ring& ring, u32 left, int left_stride, u32 right, int right_stride,
                        const float* bias = nullptr) {
    switch ((rows + 15) / 16) {
        case 1: product<PRODUCT, COLUMNS, SLICES, CHUNKS, 1>(ring, left, left_stride, right, right_stride, bias); break;
        case 2: product<PRODUCT, COLUMNS, SLICES, CHUNKS, 2>(ring, left, left_stride, right, right_stride, bias); break;
        case 3: product<PRODUCT, COLUMNS, SLICES, CHUNKS, 3>(ring, left, left_stride, right, right_stride, bias); break;
        default: product<PRODUCT, COLUMNS, SLICES, CHUNKS, 4>(ring, left, left_stride, right, right_stride, bias);
    }
    __syncthreads();
}

// -- attention --------------------------------------------------------------------------------------------------------

// The window of one step. Its tokens are in groups of per_cluster rows: the last token, whose prediction is read, and
// then, if they are computed afresh, the others in order of time. Otherwise their keys and values have been kept.
struct Window {
    int start, last;  // tokens, counted from the first real frame
    int groups;       // 1, or all of them
    bool keep;        // whether the next step sees these keys and values

    __device__ Window(const Arguments& args, int step) {
        const int end = args.frames + step;
        start = max(0, end - HISTORY), last = end - 1;
        const bool grows = step > 0 && start == max(0, last - HISTORY);
        groups = grows ? 1 : end - start;
        keep = end - start < HISTORY && step + 1 < args.horizon;
    }

    __device__ int room() const { return groups == 1 ? 32 : 64; }  // rows, with at most 21 candidates
    __device__ int token(int group) const { return group == 0 ? last : start + group - 1; }
    __device__ int rows(int per_cluster) const { return groups * per_cluster; }
};

// Sixteen numbers of a head, bf16: what one of the four lanes has that attend for one token together.
struct Part {
    uint4 low, high;

    __device__ void load(const void* p) { low = *(const uint4*)p, high = *((const uint4*)p + 1); }
    __device__ u32 pair(int i) const {
        const u32 all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        return all[i];
    }
};

__device__ float dot(const Part& a, const Part& b) {
    float s = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float2 p = unpack(a.pair(i)), q = unpack(b.pair(i));
        s += p.x * q.x + p.y * q.y;
    }
    s += __shfl_xor_sync(0xffffffffu, s, 1);
    return s + __shfl_xor_sync(0xffffffffu, s, 2);
}

// Four lanes are one head of one token: each query meets its own key and those of at most two tokens before it.
__device__ void attend(const Window& window, const char* wide, char* mixed, const bf16* kept, int per_cluster,
                       int rows) {
    const int lane = threadIdx.x % 32, part = lane % 4;
    const int heads = rows * 2;
    for (int first = threadIdx.x / 32 * 8; first < heads; first += WARPS * 8) {
        // All lanes go through the motions, because they exchange numbers.
        const int mine = min(first + lane / 4, heads - 1), row = mine / 2, head = mine % 2;
        const int group = row / per_cluster, candidate = row % per_cluster;
        const int before = window.token(group) - window.start;
        const char* own = wide + row * WIDE_STRIDE + head * 128 + part * 32;
        Part q, k[HISTORY], v[HISTORY];
        q.load(own), k[0].load(own + 2 * INNER), v[0].load(own + 4 * INNER);
#pragma unroll
        for (int i = 1; i < HISTORY; i++) {
            k[i] = k[0], v[i] = v[0];
            if (i > before) continue;
            if (window.groups > 1) {
                const char* other = wide + (i * per_cluster + candidate) * WIDE_STRIDE + head * 128 + part * 32;
                k[i].load(other + 2 * INNER), v[i].load(other + 4 * INNER);
            } else {
                const bf16* other = kept + ((i - 1) * per_cluster + candidate) * 2 * INNER + head * 64 + part * 16;
                k[i].load(other), v[i].load(other + INNER);
            }
        }
        float weight[HISTORY], most = -1e30f, total = 0;
#pragma unroll
        for (int i = 0; i < HISTORY; i++) {
            weight[i] = dot(q, k[i]);
            if (i <= before) most = fmaxf(most, weight[i]);
        }
#pragma unroll
        for (int i = 0; i < HISTORY; i++) {
            weight[i] = i <= before ? exp2f(weight[i] - most) : 0.0f;
            total += weight[i];
        }
        const float scale = 1.0f / total;
        u32 answer[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float2 sum = {0, 0};
#pragma unroll
            for (int i = 0; i < HISTORY; i++) {
                const float2 p = unpack(v[i].pair(j));
                sum.x += weight[i] * p.x, sum.y += weight[i] * p.y;
            }
            answer[j] = pack(sum.x * scale, sum.y * scale);
        }
        if (first + lane / 4 < heads) {
            uint4* at = (uint4*)(mixed + row * MIXED_STRIDE + head * 128 + part * 32);
            at[0] = {answer[0], answer[1], answer[2], answer[3]}, at[1] = {answer[4], answer[5], answer[6], answer[7]};
        }
    }
}

__device__ void keep_keys_and_values(const Window& window, const char* wide, bf16* kept, int per_cluster) {
    const int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < window.rows(per_cluster); row += WARPS) {
        const int slot = window.token(row / per_cluster) - window.start;
        const uint4 value = *(const uint4*)(wide + row * WIDE_STRIDE + 2 * INNER + lane * 16);
        *(uint4*)(kept + (slot * per_cluster + row % per_cluster) * 2 * INNER + lane * 8) = value;
    }
}

// -- the residual stream ----------------------------------------------------------------------------------------------

// A token belongs to one warp of one block. Lane i holds its numbers 4i to 4i + 3, and 128 + 2i and the next.
__device__ int number(int i) { return i < 4 ? threadIdx.x % 32 * 4 + i : 128 + threadIdx.x % 32 * 2 + i - 4; }

struct Row {
    float x[6];

    __device__ void standardise(float eps) {
        float sum = 0, squares = 0;
#pragma unroll
        for (int i = 0; i < 6; i++) sum += x[i], squares += x[i] * x[i];
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, offset);
            squares += __shfl_xor_sync(0xffffffffu, squares, offset);
        }
        const float mean = sum / WIDTH, inverse = rsqrtf(fmaxf(squares / WIDTH - mean * mean, 0.0f) + eps);
#pragma unroll
        for (int i = 0; i < 6; i++) x[i] = (x[i] - mean) * inverse;
    }

    __device__ void send(u32 tokens, int row) const {
        const u32 at = tokens + row * TOKEN_STRIDE, pairs[3] = {pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5])};
#pragma unroll
        for (int rank = 0; rank < BLOCKS; rank++)
            store_remote(in_block(at + 2 * number(0), rank), in_block(at + 2 * number(4), rank), pairs);
    }
};

struct Modulation {
    uint2 four;
    u32 two;

    __device__ void load(const bf16* mod) {
        four = __ldg((const uint2*)(mod + number(0)));
        two = __ldg((const u32*)(mod + number(4)));
    }
    __device__ float at(int i) const {
        const float2 p = unpack(i < 2 ? four.x : i < 4 ? four.y : two);
        return i % 2 ? p.y : p.x;
    }
};

// AdaLN's modulation between two norms, whose result goes to all blocks.
__device__ void send_modulated(Row row, const Modulation& shift, const Modulation& scale, u32 tokens, int index) {
    row.standardise(1e-6f);
#pragma unroll
    for (int i = 0; i < 6; i++) row.x[i] = row.x[i] * (1.0f + scale.at(i)) + shift.at(i);
    row.standardise(1e-5f);
    row.send(tokens, index);
}

// The sum of all blocks' partial results for one token, and a bias.
__device__ Row gather(u32 partial, int index, const float* bias) {
    Row y;
    const u32 at = partial + index * WIDE_STRIDE;
    u32 parts[BLOCKS][3];
#pragma unroll
    for (int rank = 0; rank < BLOCKS; rank++)
        load_remote(parts[rank], in_block(at + 2 * number(0), rank), in_block(at + 2 * number(4), rank));
#pragma unroll
    for (int i = 0; i < 6; i++) y.x[i] = __ldg(bias + number(i));
#pragma unroll
    for (int rank = 0; rank < BLOCKS; rank++)
#pragma unroll
        for (int i = 0; i < 3; i++) {
            const float2 part = unpack_half(parts[rank][i]);
            y.x[2 * i] += part.x, y.x[2 * i + 1] += part.y;
        }
    return y;
}

__device__ void add_gated(Row& row, const Modulation& gate, const Row& y) {
#pragma unroll
    for (int i = 0; i < 6; i++) row.x[i] += gate.at(i) * y.x[i];
}

// -- the kernel -------------------------------------------------------------------------------------------------------

// All steps from ``step`` on for which shared memory is laid out in the same way.
__device__ int steps_alike(const Arguments& args, int step) {
    int steps = 1;
    while (step + steps < args.horizon && Window(args, step + steps).room() == Window(args, step).room()) steps++;
    return steps;
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(WARPS * 32, 1) rollout(Arguments args) {
    extern __shared__ __align__(128) char memory[];
    const int rank = block_rank(), cluster = blockIdx.x / BLOCKS, warp = threadIdx.x / 32;
    const int per_cluster = args.per_cluster;
    const u32 tokens = shared_address(memory);
    const float* biases = args.biases + rank * BIASES;
    Ring ring;
    ring.memory = tokens, ring.source = (const char*)args.weights + (u64)rank * CHUNKS_PER_STEP * CHUNK;
    // The token that this warp owns: one of every BLOCKS * WARPS.
    const int index = warp * BLOCKS + rank;
    bf16* block_kept = args.kept + (u64)(cluster * BLOCKS + rank) * LAYERS * (HISTORY - 1) * per_cluster * 2 * INNER;
    int room = 0;  // rows that shared memory is laid out for
    cluster_arrive(), cluster_wait();  // a block's memory can be written to once it has started

#pragma unroll 1
    for (int step = 0; step < args.horizon; step++) {
        const Window window(args, step);
        const int start = window.start, rows = window.rows(per_cluster);
        if (room != window.room()) {
            if (step > 0) ring.stop();
            room = window.room();
            ring.start(room, steps_alike(args, step));
        }
        char *wide_memory = memory + wide_at(room), *hidden_memory = memory + hidden_at(room);
        const u32 wide = tokens + wide_at(room), hidden = tokens + hidden_at(room);

        // A candidate beyond the last repeats it, and its predictions are dropped.
        const int mine = min(index, rows - 1), token = window.token(mine / per_cluster);
        const int place = cluster * per_cluster + mine % per_cluster, candidate = min(place, args.candidates - 1);
        const int environment = candidate / args.samples, own_token = token - (args.frames - 1);
        const u64 own_row = (u64)candidate * args.horizon, shared_row = (u64)environment * args.frames;
        const bf16* mod = own_token >= 0 ? args.own_mod + (own_row + own_token) * MODULATION
                                         : args.shared_mod + (shared_row - environment + token) * MODULATION;
        const float* z = token < args.frames ? args.context + (shared_row + token) * WIDTH
                                             : args.out + (own_row + token - args.frames) * WIDTH;
        bool owner = index < rows;
        Row row;
        Modulation gate, shift, scale;
        if (owner) {
            shift.load(mod), scale.load(mod + WIDTH);
            const float* position = args.positions + (token - start) * WIDTH;
#pragma unroll
            for (int i = 0; i < 6; i++) row.x[i] = load_uncached(z + number(i)) + position[number(i)];
            send_modulated(row, shift, scale, tokens, index);
        }
        cluster_arrive(), cluster_wait();

#pragma unroll 1
        for (int layer = 0; layer < LAYERS; layer++, mod += 6 * WIDTH) {
            const bool last_layer = layer == LAYERS - 1;
            const float* bias = biases + layer * LAYER_BIASES;
            bf16* kept = block_kept + layer * (HISTORY - 1) * per_cluster * 2 * INNER;
            if (window.groups == 1) prefetch(kept, (window.last - start) * per_cluster * 2 * INNER);
            product<QKV, 6, 2, 6>(rows, ring, tokens, TOKEN_STRIDE, wide, WIDE_STRIDE, bias);
            // In the last layer only the last token is followed.
            const int rows_on = last_layer ? per_cluster : rows;
            owner = index < rows_on;
            if (window.keep) keep_keys_and_values(window, wide_memory, kept, per_cluster);
            attend(window, wide_memory, hidden_memory, kept, per_cluster, rows_on);
            __syncthreads();
            if (owner) gate.load(mod + 2 * WIDTH), shift.load(mod + 3 * WIDTH), scale.load(mod + 4 * WIDTH);
            product<ATTENTION_OUT, 3, 4, 2>(rows_on, ring, hidden, MIXED_STRIDE, wide, WIDE_STRIDE);
            cluster_arrive(), cluster_wait();
            if (owner) {
                add_gated(row, gate, gather(wide, index, bias + INNER));
                send_modulated(row, shift, scale, tokens, index);
            }
            cluster_arrive(), cluster_wait();

            const float* mlp_bias = bias + INNER + WIDTH;
            product<MLP_HIDDEN, 4, 3, 4>(rows_on, ring, tokens, TOKEN_STRIDE, hidden, HIDDEN_STRIDE, mlp_bias);
            if (owner) {
                gate.load(mod + 5 * WIDTH);
                if (!last_layer) shift.load(mod + 6 * WIDTH), scale.load(mod + 7 * WIDTH);
            }
            product<MLP_OUT, 3, 4, 4>(rows_on, ring, hidden, HIDDEN_STRIDE, wide, WIDE_STRIDE);
            cluster_arrive(), cluster_wait();
            if (owner) {
                add_gated(row, gate, gather(wide, index, mlp_bias + HIDDEN));
                if (!last_layer) {
                    send_modulated(row, shift, scale, tokens, index);
                } else {
                    Row normed = row;
                    normed.standardise(1e-5f);
                    normed.send(tokens, index);
                }
            }
            cluster_arrive(), cluster_wait();
        }

        const float* bias = biases + LAYERS * LAYER_BIASES;
        product<MLP_HIDDEN, 4, 3, 4>(per_cluster, ring, tokens, TOKEN_STRIDE, hidden, HIDDEN_STRIDE, bias);
        product<MLP_OUT, 3, 4, 4>(per_cluster, ring, hidden, HIDDEN_STRIDE, wide, WIDE_STRIDE);
        cluster_arrive(), cluster_wait();
        if (owner) {
            const Row y = gather(wide, index, bias + HIDDEN);
            float* out = args.out + ((u64)candidate * args.horizon + step) * WIDTH;
#pragma unroll
            for (int i = 0; i < 6; i++)
                if (place < args.candidates) out[number(i)] = y.x[i];
        }
        // The predictions are the next step's tokens; also, no block may leave while another reads its memory.
        cluster_arrive(), cluster_wait();
    }
}
