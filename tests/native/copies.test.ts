/** Copies between the host and a device, of sizes that a GPU's library divides among threads too. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const piece = 2 ** 23;
/** A prime number of bytes, so that no two pieces are alike. */
const period = Uint8Array.from({ length: 65537 }, (_, i) => Math.imul(i + 1, 0x9e3779b1) >>> 24);

test.each([1, piece + 1, 8 * piece, 16 * piece + 4, 25 * piece - 3])(
	"%d bytes come back as they went, into the middle of memory too",
	(bytes) => {
		const around = 4096;
		const source = Buffer.alloc(bytes, period);
		const allocation = device.allocate(bytes + 2 * around, "data");
		device.setZero({ allocation, byteOffset: 0 }, bytes + 2 * around);
		device.copyToDevice({ allocation, byteOffset: around }, source);
		// A small copy after a large one takes pinned memory that the large one may still use.
		device.copyToDevice({ allocation, byteOffset: 0 }, Uint8Array.of(7));
		const back = new Uint8Array(bytes + 2 * around);
		device.copyToHost(back, { allocation, byteOffset: 0 });
		expect(Buffer.compare(back.subarray(around, around + bytes), source)).toBe(0);
		expect(back[0]).toBe(7);
		expect(back.subarray(1, around).some((byte) => byte !== 0)).toBe(false);
		expect(back.subarray(around + bytes).some((byte) => byte !== 0)).toBe(false);
		allocation.release();
	},
);
