/**
 * The released executable (`npm run build:release`) runs on old systems, alone, and reads only files that it was told
 * to read.
 */
import { describe, expect, test } from "bun:test";
import { existsSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { absent } from "../absent.ts";

const root = join(import.meta.dir, "../..");
const library = join(root, "build/lib-release/libmimo_cpu.so");
const cudaLibrary = join(root, "build/lib-release/libmimo_cuda.so");
const program = join(root, "dist/release/mimo");
/** RHEL 8's. */
const glibcFloor = [2, 28] as const;

const missing = [library, cudaLibrary, program].filter((path) => !existsSync(path));
const built = missing.length === 0 || absent("the release", "npm run build:release") !== null;

function readelf(flags: readonly string[], path: string): string {
	const { success, stdout, stderr } = Bun.spawnSync(["readelf", "--wide", ...flags, path]);
	if (!success) throw new Error(`readelf ${path}: ${stderr}`);
	return stdout.toString();
}

/** Versions of glibc whose symbols a file wants. */
function glibcVersions(path: string): [number, number][] {
	const versions = readelf(["--version-info"], path).matchAll(/Name: GLIBC_(\d+)\.(\d+)/g);
	return [...versions].map(([, major, minor]) => [Number(major), Number(minor)]);
}

describe.skipIf(!built)("the release", () => {
	for (const path of [library, cudaLibrary, program]) {
		test(`${path.slice(root.length + 1)} wants no glibc above ${glibcFloor.join(".")}`, () => {
			const versions = glibcVersions(path);
			expect(versions.length).toBeGreaterThan(0);
			const above = versions.filter(
				([major, minor]) => major > glibcFloor[0] || (major === glibcFloor[0] && minor > glibcFloor[1]),
			);
			expect(above).toEqual([]);
		});
	}

	test("the CPU library needs nothing but the C library, the CUDA library what unwinds exceptions besides", () => {
		const needed = (path: string) =>
			[...readelf(["--dynamic"], path).matchAll(/\(NEEDED\).*\[(.+)\]/g)].map(([, name]) => name!);
		const ofTheSystem = /^(libc|libm|libdl|libpthread|librt|ld-linux-x86-64)\.so\.\d+$/;
		expect(needed(library).filter((name) => !ofTheSystem.test(name))).toEqual([]);
		expect(needed(cudaLibrary).filter((name) => !ofTheSystem.test(name))).toEqual(["libgcc_s.so.1"]);
	});

	test("it runs where there is nothing else, and reads no .env and no bunfig.toml", () => {
		const folder = mkdtempSync(join(tmpdir(), "mimo-release-"));
		try {
			writeFileSync(join(folder, ".env"), "MIMO_DEBUG=4\n");
			writeFileSync(join(folder, "bunfig.toml"), 'preload = ["./absent.ts"]\n');
			const { exitCode, stdout, stderr } = Bun.spawnSync([program, "--version"], {
				cwd: folder,
				env: { PATH: "/usr/bin:/bin" },
			});
			expect(stderr.toString()).toBe("");
			expect(stdout.toString()).toMatch(/^mimo \d+\.\d+\.\d+/);
			expect(stdout.toString()).toContain("OpenBLAS");
			expect(exitCode).toBe(0);
		} finally {
			rmSync(folder, { recursive: true });
		}
	});
});
