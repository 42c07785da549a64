/** The sources of a run's secret, and the loopback interface of a run without a secret. */
import { afterAll, expect, test } from "bun:test";
import { chmodSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { Place } from "../../src/launch/place.ts";
import { rendezvousAddress } from "../../src/launch/rendezvous/line-connection.ts";
import { readSecretFile, secretFromEnvironment } from "../../src/launch/secret.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-secret-"));
afterAll(() => rmSync(folder, { recursive: true }));

function file(name: string, text: string, mode = 0o600): string {
	const path = join(folder, name);
	writeFileSync(path, text);
	chmodSync(path, mode);
	return path;
}

const text = "0123456789abcdef0123456789abcdef";

test("MIMO_SECRET takes precedence, and an empty value counts as absent", () => {
	const path = file("first", text);
	expect(secretFromEnvironment({ MIMO_SECRET: " given\n", MIMO_SECRET_FILE: path }, "run")).toBe("given");
	expect(secretFromEnvironment({ MIMO_SECRET: "" }, "run")).toBeNull();
	expect(secretFromEnvironment({}, "run")).toBeNull();
});

test("a file gives every run its own secret, which is not the file's text", () => {
	const environment = { MIMO_SECRET_FILE: file("several", `${text}\n`) };
	const [one, again, two] = ["slurm 1.0", "slurm 1.0", "slurm 2.0"].map((run) =>
		secretFromEnvironment(environment, run),
	);
	expect(one).toMatch(/^[0-9a-f]{64}$/);
	expect(again).toBe(one!);
	expect(two).not.toBe(one!);
	expect(one).not.toContain(text);
});

test("a file that others can read, or that is too short, is refused with a remedy", () => {
	for (const [path, why] of [
		[file("group", text, 0o640), "can be read or written by others (allowed is mode 600)"],
		[file("world", text, 0o604), "can be read or written by others (allowed is mode 600)"],
		[file("short", "secret"), "holds fewer than 16 characters"],
		[file("long", "x".repeat(5000)), "is longer than 4096 bytes"],
		[folder, "is not a regular file"],
		["/dev/null", "is not a regular file"],
		[join(folder, "absent"), "cannot be opened (ENOENT)"],
	] as const) {
		expect(() => readSecretFile(path)).toThrow(
			`MIMO_SECRET_FILE ${path} ${why}; make it by: (umask 077; head -c 32 /dev/urandom | base64 > ${path})`,
		);
	}
});

test("a file of another user is refused", () => {
	if (process.geteuid!() === 0) {
		const path = file("theirs", text);
		expect(Bun.spawnSync(["chown", "65534", path]).success).toBe(true);
		expect(() => readSecretFile(path)).toThrow("belongs to another user");
	} else expect(() => readSecretFile("/etc/hostname")).toThrow("belongs to another user");
});

function place(address: string, change: Partial<Place> = {}): Place {
	const ranks = { rank: 0, worldSize: 4, localRank: 0, localSize: 2 };
	return { ...ranks, address, port: 1, secret: null, launcher: null, ...change };
}

test("without a secret the rendezvous is on the loopback interface", async () => {
	expect(await rendezvousAddress(place("127.0.0.1"), 0)).toBe("127.0.0.1");
	expect(await rendezvousAddress(place("localhost"), 0)).toBe("127.0.0.1");
	expect(await rendezvousAddress(place("::1"), 0)).toBe("::1");
	for (const address of ["0.0.0.0", "10.1.2.3", "::", "2001:db8::1"]) {
		await expect(rendezvousAddress(place(address), 0)).rejects.toThrow(
			`Other hosts can reach ${address}, where the ranks meet, and the run has no secret: set MIMO_SECRET to`,
		);
		expect(await rendezvousAddress(place(address, { secret: "s" }), 0)).toBe(address);
	}
});

test("a name that does not resolve is named", async () => {
	await expect(rendezvousAddress(place("no.such.host.invalid"), 0)).rejects.toThrow(
		"MASTER_ADDR no.such.host.invalid does not resolve on this host (ENOTFOUND).",
	);
	const known = place("no.such.host.invalid", { fallbackAddress: "10.0.0.3", secret: "s" });
	expect(await rendezvousAddress(known, 0)).toBe("10.0.0.3");
});
