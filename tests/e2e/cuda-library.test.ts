/** The CUDA library where there is no GPU: it loads without any of NVIDIA's libraries, says so, and "auto" takes the CPU. */
import { afterAll, describe, expect, test } from "bun:test";
import { existsSync } from "node:fs";
import { join } from "node:path";
import * as abi from "../../src/native/abi.ts";
import { Device } from "../../src/native/device.ts";
import { openLibrary } from "../../src/native/library.ts";
import { deviceCount, openLibraryOf } from "../../src/native/open-device.ts";
import { absent } from "../absent.ts";

const root = join(import.meta.dir, "../..");
const built = ["build/lib-release/libmimo_cuda.so", "build/lib/libmimo_cuda.so"]
	.map((file) => join(root, file))
	.find((file) => existsSync(file));
const file = built ?? absent("the CUDA library", "npm run build:cuda");
const before = process.env.MIMO_CUDA_LIBRARY;
if (file !== null) process.env.MIMO_CUDA_LIBRARY = file;
afterAll(() => {
	if (before === undefined) delete process.env.MIMO_CUDA_LIBRARY;
	else process.env.MIMO_CUDA_LIBRARY = before;
});
const gpu = file !== null && deviceCount(await openLibrary("cuda")) > 0;

describe.skipIf(file === null)("the CUDA library", () => {
	test("exports every function of abi.ts and nothing else", () => {
		const { stdout, success } = Bun.spawnSync(["nm", "-D", "--defined-only", file!]);
		expect(success).toBe(true);
		const names = stdout
			.toString()
			.trim()
			.split("\n")
			.map((line) => line.split(" ")[2]!);
		const wanted = [...Object.keys(abi.functions), ...Object.keys(abi.operations).map((name) => `mimo_${name}`)];
		expect(names.toSorted()).toEqual(wanted.toSorted());
	});

	test("needs nothing but the C and C++ compilers' own libraries to load", () => {
		const { stdout } = Bun.spawnSync(["readelf", "-d", file!], { env: { ...process.env, LC_ALL: "C" } });
		const needed = [...stdout.toString().matchAll(/\(NEEDED\).*\[(.*)\]/g)].map(([, name]) => name!);
		// release.test.ts says which of them a released library may need.
		const allowed = /^(libc|libm|libdl|librt|libpthread|ld-linux-x86-64|libgcc_s)\.so/;
		expect(needed.filter((name) => !allowed.test(name))).toEqual([]);
	});

	test.skipIf(gpu)("sees no GPU here, and says so when one is asked for", async () => {
		const library = await openLibrary("cuda");
		expect(library.kind).toBe("cuda");
		expect(() => Device.open(library)).toThrow(/no NVIDIA GPU|driver/);
	});

	test.skipIf(gpu)("names what to install", async () => {
		const { versions } = await openLibrary("cuda");
		for (const name of ["cuBLASLt", "cuDNN", "NCCL"]) expect(versions).toContain(name);
		if (versions.includes("not found")) expect(versions).toMatch(/Install the Python package nvidia-\w+/);
	});

	test("auto takes it only where there is a GPU", async () => {
		expect((await openLibraryOf("auto")).kind).toBe(gpu ? "cuda" : "cpu");
	});
});
