/**
 * Computes on two threads: `bun pinned-program.ts [CPUS]`. Prints the CPUs that its main thread may use and those of the threads that were
 * started since it was bound to CPUS, and a digest of the results.
 */
import { readdirSync, readFileSync } from "node:fs";
import { parseCpuList, runOn } from "../../src/native/affinity.ts";
import { Device } from "../../src/native/device.ts";
import { openLibrary } from "../../src/native/library.ts";
import { gemm } from "../../src/tensor/ops/linear.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { randomValues } from "../support.ts";

const threads = () => readdirSync("/proc/self/task");
const cpusOf = (thread: string) =>
	/^Cpus_allowed_list:\s+(\S+)$/m.exec(readFileSync(`/proc/self/task/${thread}/status`, "utf8"))![1]!;

const before = new Set(threads());
if (process.argv[2] && !runOn(parseCpuList(process.argv[2]))) throw new Error("The kernel refuses.");
using device = Device.open(await openLibrary("cpu"), { threads: 2 });
const size = 256;
using a = Tensor.from(device, randomValues(size * size, 1), [size, size]);
using b = Tensor.from(device, randomValues(size * size, 2), [size, size]);
using c = Tensor.zeros(device, [size, size]);
gemm(device, { tensor: a, transposed: false }, { tensor: b, transposed: false }, c);
const sum = new Bun.CryptoHasher("sha256").update(c.toFloat32()).digest("hex");
const added = threads().filter((thread) => !before.has(thread));
console.log(JSON.stringify({ main: cpusOf(String(process.pid)), added: added.map(cpusOf), sum }));
