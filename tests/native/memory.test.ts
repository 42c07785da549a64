import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import { Dtype, MemoryTag, Status } from "../../src/native/abi.ts";
import { Device } from "../../src/native/device.ts";
import { openLibrary } from "../../src/native/library.ts";
import type { Allocation } from "../../src/native/memory.ts";
import { NativeError } from "../../src/system/errors.ts";
import { Tensor } from "../../src/tensor/tensor.ts";

let device: Device;
beforeEach(async () => {
	device = Device.open(await openLibrary("cpu"), { threads: 1 });
});
afterEach(() => device[Symbol.dispose]());

function release(...allocations: Allocation[]): void {
	for (const allocation of allocations) allocation.release();
}

/** The error that a call threw. */
function errorOf(call: () => void): Error {
	try {
		call();
	} catch (error) {
		return error as Error;
	}
	throw new Error("The call succeeded.");
}

describe("statistics", () => {
	test("count requested bytes: live, at the peak and by tag", () => {
		const weights = device.allocate(1000, "parameter");
		const first = device.allocate(5000, "activation");
		const second = device.allocate(3000, "activation");
		release(first);
		const third = device.allocate(100, "workspace");
		const statistics = device.memoryStatistics();
		expect(statistics.liveBytes).toBe(4100);
		expect(statistics.liveBlocks).toBe(3);
		expect(statistics.peakBytes).toBe(9000);
		const none = { parameter: 0, gradient: 0, optimizer: 0, activation: 0, workspace: 0, data: 0, communication: 0 };
		expect(statistics.liveBytesByTag).toEqual({ ...none, parameter: 1000, activation: 3000, workspace: 100 });
		expect(statistics.peakBytesByTag).toEqual({ ...none, parameter: 1000, activation: 8000, workspace: 100 });
		expect(statistics.reservedBytes).toBeGreaterThanOrEqual(9000);

		device.resetPeakMemory();
		expect(device.memoryStatistics().peakBytes).toBe(4100);
		expect(device.memoryStatistics().peakBytesByTag.activation).toBe(3000);
		release(weights, second, third);
		expect(device.memoryStatistics().liveBytes).toBe(0);
		expect(device.memoryStatistics().liveBytesByTag).toEqual(none);
		expect(device.memoryStatistics().peakBytes).toBe(4100);
	});

	test("an operation's temporary memory is counted as workspace and given back", () => {
		using dy = Tensor.zeros(device, [640, 10]);
		using dbias = Tensor.zeros(device, [10]);
		device.run("column_sum", {
			...{ dy, dbias, row_count: null, rows: 640, width: 10, stride: 10 },
			dtype: Dtype.f32,
		});
		const statistics = device.memoryStatistics();
		expect(statistics.liveBytesByTag.workspace).toBe(0);
		expect(statistics.peakBytesByTag.workspace).toBeGreaterThan(0);
	});
});

describe("blocks", () => {
	test("are aligned, distinct and writable to their last byte, whatever their size", () => {
		const sizes = [0, 0, 1, 63, 64, 65, 1024, 1025, 4097, 3_000_001];
		const blocks = sizes.map((bytes) => device.allocate(bytes, "data"));
		for (const block of blocks) expect(block.address % 64).toBe(0);
		expect(new Set(blocks.map((block) => block.address)).size).toBe(sizes.length);
		for (const [i, allocation] of blocks.entries()) {
			device.copyToDevice({ allocation, byteOffset: 0 }, new Uint8Array(sizes[i]!).fill(i));
		}
		for (const [i, allocation] of blocks.entries()) {
			const bytes = new Uint8Array(sizes[i]!);
			device.copyToHost(bytes, { allocation, byteOffset: 0 });
			expect(bytes.every((byte) => byte === i)).toBe(true);
		}
		release(...blocks);
	});

	test("are reused: a second round of the same sizes asks the system for nothing", () => {
		const round = () => {
			const blocks = [10, 5000, 123_456, 123_456].map((bytes) => device.allocate(bytes, "activation"));
			const addresses = blocks.map((block) => block.address);
			release(...blocks);
			return addresses.toSorted();
		};
		const first = round();
		const before = device.memoryStatistics();
		expect(round()).toEqual(first);
		const after = device.memoryStatistics();
		expect(after.systemAllocations).toBe(before.systemAllocations);
		expect(after.reservedBytes).toBe(before.reservedBytes);
	});

	test("go back to the system when trimmed, live ones excepted", () => {
		const kept = device.allocate(1000, "data");
		release(device.allocate(100_000, "data"));
		device.trimMemory();
		expect(device.memoryStatistics().reservedBytes).toBeLessThan(2000);
		release(kept);
	});
});

describe("refusals", () => {
	test("the limit: one sentence with the sizes and the purpose; nothing is lost", () => {
		device.limitMemory(10_000);
		const held = device.allocate(8000, "parameter");
		const error = errorOf(() => device.allocate(2001, "activation")) as NativeError;
		expect(error).toBeInstanceOf(NativeError);
		expect(error.status).toBe(Status.outOfMemory);
		expect(error.message).toBe(
			"Out of device memory: 2001 bytes for activations on top of 8000 live pass the limit of 10000 bytes.",
		);
		expect(device.memoryStatistics().liveBytes).toBe(8000);
		release(device.allocate(2000, "activation"));
		device.limitMemory(0);
		release(device.allocate(50_000, "activation"), held);
	});

	test("memory the system does not have", () => {
		const error = errorOf(() => device.allocate(2 ** 52, "optimizer")) as NativeError;
		expect(error.status).toBe(Status.outOfMemory);
		expect(error.message).toBe(
			"Out of device memory: no room for 4503599627370496 bytes of optimizer with 0 bytes live.",
		);
	});

	test("a negative size and an unknown tag", () => {
		expect(errorOf(() => device.allocate(-1, "data")).message).toBe("mimo_memory_allocate needs bytes >= 0.");
		const out = new BigUint64Array(1);
		const tag = Object.keys(MemoryTag).length;
		const status = device.library.symbols.mimo_memory_allocate!(device.stream.handle, 1, tag, out);
		expect(status).toBe(Status.argument);
	});

	test("a second free: by the owner count, and by the library for an address that is not live", () => {
		const block = device.allocate(100, "data");
		const { address } = block;
		block.release();
		expect(() => block.release()).toThrow("Device memory was released twice.");
		expect(() => block.retain()).toThrow("retained after its last owner released it");
		const { symbols } = device.library;
		expect(symbols.mimo_memory_free!(device.stream.handle, address)).toBe(Status.argument);
		expect(String(symbols.mimo_last_error!())).toBe("mimo_memory_free was given an address that is not live.");
	});

	test("use after release, in operations and copies; disposing twice", () => {
		const x = Tensor.from(device, Float32Array.of(1, 2));
		using y = Tensor.zeros(device, [2]);
		x[Symbol.dispose]();
		expect(() => x[Symbol.dispose]()).toThrow("A tensor was disposed twice.");
		expect(() => device.run("add", { a: x, b: y, y, elements: 2, dtype: Dtype.f32 })).toThrow("that was released");
		expect(() => device.copyToHost(new Float32Array(2), x)).toThrow("that was released");
		expect(() => x.share()).toThrow("retained after its last owner released it");
	});

	test("copies past a block's end", () => {
		using x = Tensor.zeros(device, [4]);
		expect(() => device.copyToHost(new Float32Array(5), x)).toThrow("A copy of 20 bytes passes the end of a block");
		using tail = x.columns(3, 1);
		expect(() => device.copyToDevice(tail, new Float32Array(2))).toThrow(RangeError);
		expect(() => device.setZero(tail, 8)).toThrow(RangeError);
	});
});
