/** Devices of a test file. */
import { afterAll, beforeAll } from "bun:test";
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
