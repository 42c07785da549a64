/** Devices of a test file. */
import { afterAll, afterEach, beforeAll, beforeEach, expect } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { testDevice } from "../support.ts";

/** Opens devices with two threads and with one before the tests of a file, and closes them behind those. */
export function openDevices(take: (two: Device, one: Device) => void): void {
	const opened: Device[] = [];
	beforeAll(async () => {
		opened.push(await testDevice(2), await testDevice(1));
		take(opened[0]!, opened[1]!);
	});
	afterAll(() => {
		for (const device of opened) device[Symbol.dispose]();
	});
}

/** Opens a device for the tests of a file; every test fails that leaves more memory behind than it has found. */
export function openDeviceWithoutLeaks(take: (device: Device) => void): void {
	let device: Device;
	let before: number;
	const live = () => device.memoryStatistics().liveBytes;
	beforeAll(async () => {
		device = await testDevice();
		take(device);
	});
	afterAll(() => device[Symbol.dispose]());
	beforeEach(() => {
		before = live();
	});
	afterEach(() => expect(live()).toBe(before));
}
