/*
 * mimo.h - the C ABI between the TypeScript program and its native libraries.
 *
 * The same symbols with the same meaning are built twice: libmimo_cpu.so (x86-64 Linux with AVX2) and libmimo_cuda.so
 * (NVIDIA GPUs). Usage:
 *
 *     mimo_device* device; mimo_stream* stream; void* x;
 *     if (mimo_abi_version() != MIMO_ABI_VERSION) ...            // the library is of another version
 *     mimo_device_open(0, 2, &device);                           // device index, CPU threads
 *     mimo_stream_create(device, 0, &stream);
 *     mimo_memory_allocate(stream, bytes, MIMO_TAG_ACTIVATION, &x);
 *     mimo_memory_copy_to_device(stream, x, host, bytes);
 *     mimo_rms_norm_forward_args args = {...};
 *     if (mimo_rms_norm_forward(stream, &args)) puts(mimo_last_error());
 *     mimo_stream_synchronize(stream);
 *
 * Rules
 *  - Functions that return int32_t return a status: MIMO_OK or a MIMO_ERROR_*. mimo_last_error() then holds one sentence
 *    (per thread). C++ exceptions do not cross the ABI, and there are no callbacks. (mimo_abi_version returns a number.)
 *  - An operation is `int32_t mimo_NAME(mimo_stream*, const mimo_NAME_args*)`: it reads the argument struct before it
 *    returns, is queued on the stream, and takes temporary memory from the pool of the stream's device. On the CPU library
 *    it is complete when it returns.
 *  - Pointers inside argument structs are device memory. Pointers to tensors and tables on the host start with `host_`. A
 *    null pointer is legal only where the comment says "or null".
 *  - Matrices are row major. A `stride` counts elements between consecutive rows; tensors without one are contiguous.
 *  - dtype fields hold MIMO_DTYPE_*. Arithmetic is fp32 (sums that need it in fp64), whatever the storage type.
 *  - `row_count` (device int32, or null) is the number of valid rows, at most the shape's, so that the host need not know
 *    how many tokens an expert has. Rows beyond it are neither read nor written.
 *  - `cu_seqlens` is device int32 [sequences + 1], cumulative token counts of packed sequences, first 0, last = tokens.
 *  - Gradients of parameters (`float*`: dweight, dbias, dw, dtable, dfactors...) are accumulated into the fp32 main
 *    gradients; gradients of activations are overwritten. Exceptions are noted at the field.
 *  - Scalars that change with every step (learning rate, clip factor, found-inf) are read from device memory.
 *  - No floating-point atomics: results do not depend on scheduling (but see mimo_device_set_deterministic).
 *  - These headers are the one definition of the ABI: src/native/abi.ts, its folder abi/ and common/operations.def are
 *    generated from them (tables.ts, "bun build.ts tables"). They are therefore plain C with every enum value written out
 *    and every argument named.
 *
 * Symbols in shapes: T tokens, H heads, P head dimension, G groups, N state dimension, E experts, K top-k, S sequences.
 */
#pragma once

/* The library, devices and memory. */
#include "mimo/library.h"    /* version, statuses, errors, dtypes */
#include "mimo/device.h"     /* devices, determinism */
#include "mimo/stream.h"     /* streams, CUDA graphs, events */
#include "mimo/algorithms.h" /* selection of the vendor libraries' algorithms */
#include "mimo/memory.h"     /* allocation, statistics, copies */

/* Runs of several ranks. */
#include "mimo/run.h"           /* ranks of a host: liveness, failure, diagnosis, flight recorder */
#include "mimo/hosts.h"         /* runs on several hosts */
#include "mimo/collectives.h"   /* groups, collectives, send and receive; NCCL or shared memory */
#include "mimo/exchange_rows.h" /* rows between ranks that hold experts */

/* Signals. */
#include "mimo/interrupts.h" /* Ctrl-C that takes effect after the current step */

/* Files. */
#include "mimo/digests.h" /* SHA-256 of a file that is being written */
#include "mimo/images.h"  /* JPEG, PNG, WebP, GIF and BMP: decode, resize, normalize */

/* Operations, with the prefixes of their functions' names. */
#include "mimo/ops/gemm.h"          /* gemm, gelu_gemm */
#include "mimo/ops/spmm.h"          /* spmm */
#include "mimo/ops/norms.h"         /* rms_norm, layer_norm, head_norm */
#include "mimo/ops/activation.h"    /* activation */
#include "mimo/ops/attention.h"     /* attention, latent_heads */
#include "mimo/ops/rope.h"          /* rope */
#include "mimo/ops/mamba.h"         /* causal_conv1d, ssd */
#include "mimo/ops/gated_delta.h"   /* gated_delta, gate */
#include "mimo/ops/router.h"        /* router */
#include "mimo/ops/moe_dispatch.h"  /* moe_sort, moe_permute, moe_unpermute, moe_token_nodes, moe_node_experts, expert_exchange_plan */
#include "mimo/ops/e4m3.h"          /* e4m3 */
#include "mimo/ops/grouped_gemm.h"  /* grouped_gemm, grouped_bias */
#include "mimo/ops/grouped_mlp.h"   /* grouped_mlp */
#include "mimo/ops/elastic_masks.h" /* mask_factors, mask_columns, mask_scores, masked_rms_norm, masked_activation */
#include "mimo/ops/embedding.h"     /* embedding */
#include "mimo/ops/loss.h"          /* cross_entropy, kl, hidden_loss */
#include "mimo/ops/elementwise.h"   /* axpby, add, fill, scale */
#include "mimo/ops/reductions.h"    /* column_sum, masked_sum, sum_of_squares, count_zeros, checksum, find_nonfinite */
#include "mimo/ops/philox.h"        /* philox_fill, dropout */
#include "mimo/ops/optimizer.h"     /* clip_factor, adam_advance, adamw, muon */
