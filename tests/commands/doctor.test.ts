import { expect, test } from "bun:test";
import { mimo } from "./mimo.ts";

test("doctor shows the machine, one line each, and that training can run", () => {
	const { exitCode, stdout, stderr } = mimo(["doctor"], ".", { MIMO_CPU_LIBRARY: "" });
	expect([exitCode, stderr]).toEqual([0, ""]);
	for (const name of ["processor", "cores", "memory", "/dev/shm", "open files", "cpu library", "cpu device"]) {
		expect(stdout).toMatch(new RegExp(`^(ok|!)? *${name} +\\S`, "m"));
	}
	expect(stdout).toMatch(/cpu library +embedded, ABI \d+/);
	expect(stdout).toMatch(/cpu device .*\d+ threads/);
	expect(stdout).toEndWith("Training can run here.\n");
});

test("doctor --json has the numbers", () => {
	const { exitCode, stdout } = mimo(["doctor", "--json"]);
	expect(exitCode).toBe(0);
	const { ready, findings } = JSON.parse(stdout);
	expect(ready).toBe(true);
	const device = findings.find(({ name }: { name: string }) => name === "cpu device");
	expect(device.details.threads).toBeGreaterThan(0);
	expect(device.details.memoryBytes).toBeGreaterThan(2 ** 28);
});

test("doctor fails when the native library is absent or broken, and names it", () => {
	for (const [library, sentence] of [
		["/nowhere/libmimo_cpu.so", "MIMO_CPU_LIBRARY names /nowhere/libmimo_cpu.so, which does not exist."],
		[import.meta.path, `The native library ${import.meta.path} cannot be loaded:`],
	] as const) {
		const { exitCode, stdout } = mimo(["doctor"], ".", { MIMO_CPU_LIBRARY: library });
		expect(exitCode).toBe(1);
		expect(stdout).toMatch(/^x +cpu library +does not load: /m);
		expect(stdout).toContain(sentence);
		expect(stdout).toEndWith("Training cannot run here; see the lines marked x.\n");
	}
});

test("doctor refuses flags it does not know", () => {
	const { exitCode, stderr } = mimo(["doctor", "--jsno"]);
	expect(exitCode).toBe(2);
	expect(stderr).toBe("mimo: --jsno: there is no such flag; the nearest is --json.\n");
});

test("doctor fails for a file in the place of the run's folder", () => {
	const { exitCode, stdout } = mimo(["doctor", "--folder", import.meta.path]);
	expect(exitCode).toBe(1);
	expect(stdout).toContain(`${import.meta.path} is not a folder`);
});
