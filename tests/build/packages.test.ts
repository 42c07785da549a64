/** The archive and the npm package of a release, and the Dockerfile: what is in them, and that it runs. */
import { afterAll, describe, expect, test } from "bun:test";
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, statSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { packageName, releaseName, wheelName } from "../../packaging/release.ts";
import { absent } from "../absent.ts";

const root = join(import.meta.dir, "../..");
const { version } = JSON.parse(readFileSync(join(root, "package.json"), "utf8")) as { version: string };
const archive = join(root, `dist/release/${releaseName}.tar.zst`);
const npmPackage = join(root, `dist/release/${packageName}-${version}.tgz`);

const wheel = join(root, "dist/release", wheelName);

const built =
	[archive, npmPackage, wheel].every(existsSync) || absent("the packages", "npm run build:release") !== null;

describe.skipIf(!built)("a release", () => {
	const folder = mkdtempSync(join(tmpdir(), "mimo-packages-"));
	afterAll(() => rmSync(folder, { recursive: true }));
	/** Runs without the PATH of this machine: nothing but what was unpacked is found. */
	const bare = (command: readonly string[], cwd: string) => {
		const { exitCode, stdout, stderr } = Bun.spawnSync([...command], { cwd, env: { PATH: "/nowhere" } });
		return { exitCode, stdout: stdout.toString(), stderr: stderr.toString() };
	};

	test("unpacks to a folder that trains on the digits it brings", async () => {
		const tar = await Bun.zstdDecompress(readFileSync(archive));
		expect(Bun.spawnSync(["tar", "-C", folder, "-xf", "-"], { stdin: tar }).exitCode).toBe(0);
		const unpacked = join(folder, releaseName);
		for (const file of ["LICENSE", "README.md", "CHANGELOG.md", "docs/versions.md", "completions/mimo.bash"]) {
			expect(readFileSync(join(unpacked, file), "utf8").length).toBeGreaterThan(100);
		}
		for (const part of [
			"README.md",
			"libopenblas-dev.txt",
			"libwebp-dev.txt",
			"citty.txt",
			// A package that another needs.
			"long.txt",
			"nvidia-cuda_runtime.txt",
		]) {
			expect([part, existsSync(join(unpacked, "licences", part))]).toEqual([part, true]);
		}
		expect(statSync(join(unpacked, "mimo")).mode & 0o777).toBe(0o755);
		const length = ["--train-iters", "2", "--lr-warmup-iters", "0", "--eval-iters", "0", "--eval-captions", "0"];
		const { exitCode, stdout, stderr } = bare(
			[join(unpacked, "mimo"), "train", "--config", "examples/vlm-tiny.yaml", "--threads", "1", ...length],
			unpacked,
		);
		expect([exitCode, stderr]).toEqual([0, ""]);
		expect(stdout).toContain("Trained 2 steps");
	}, 60_000);

	test("installs from npm offline, without scripts and dependencies, with the command mimo", () => {
		const target = join(folder, "npm");
		mkdirSync(target);
		const install = [
			"npm",
			"install",
			"--offline",
			"--no-audit",
			"--no-fund",
			"--silent",
			"--prefix",
			target,
			npmPackage,
		];
		expect(Bun.spawnSync(install, { cwd: target }).exitCode).toBe(0);
		const about = JSON.parse(readFileSync(join(target, "node_modules", packageName, "package.json"), "utf8"));
		expect(about).toMatchObject({ version, bin: { mimo: "mimo" }, os: ["linux"], cpu: ["x64"] });
		expect([about.scripts, about.dependencies]).toEqual([undefined, undefined]);
		const { exitCode, stdout } = bare([join(target, "node_modules/.bin/mimo"), "--version"], target);
		expect([exitCode, stdout]).toEqual([0, expect.stringMatching(new RegExp(`^mimo ${version} .*cuda`))]);
	}, 60_000);

	test("installs from the wheel by pip, with the command mimo, which trains", () => {
		const target = join(folder, "venv");
		expect(Bun.spawnSync(["python3", "-m", "venv", "--without-pip", target]).exitCode).toBe(0);
		const pip = ["python3", "-m", "pip", "--python", join(target, "bin/python")];
		const install = [...pip, "install", "--quiet", "--no-index", "--disable-pip-version-check", wheel];
		const installed = Bun.spawnSync(install, { stderr: "pipe" });
		expect([installed.exitCode, installed.stderr.toString()]).toEqual([0, ""]);
		const mimo = join(target, "bin/mimo");
		expect(bare([mimo, "--version"], target).stdout).toStartWith(`mimo ${version} `);
		const tiny =
			"train --preset nemotron-vlm-tiny --dataset-provider mock --llm-offset 0 --train-iters 2 --lr-warmup-iters 0";
		const { exitCode, stdout } = bare([mimo, ...tiny.split(" "), "--device", "cpu", "--threads", "1"], target);
		expect([exitCode, stdout]).toEqual([0, expect.stringContaining("Trained 2 steps")]);
	}, 120_000);
});

describe("the Dockerfile", () => {
	const text = readFileSync(join(root, "Dockerfile"), "utf8");
	const build = readFileSync(join(root, "build.ts"), "utf8");

	test("installs what the build needs, which would fetch it one by one", () => {
		const debian = [...build.matchAll(/^\t+"?([a-z+\d-]+)"?: (?:\(\) =>|\[")/gm)].map(([, name]) => name!);
		const needed = debian.filter((name) => /^(lib.*-dev|cmake|ninja-build|g\+\+|python3.*)$/.test(name));
		expect(needed).toContain("libwebp-dev");
		expect(needed).toContain("ninja-build");
		const stage = text.slice(0, text.indexOf("WORKDIR")).split(/\s+/);
		expect(needed.filter((name) => !stage.includes(name))).toEqual([]);
	});

	test("takes the versions of NVIDIA's libraries whose headers the build takes", () => {
		const wheels = [...text.matchAll(/nvidia-[\w-]+==[\d.]+/g)].map(([wheel]) => wheel);
		expect(wheels).toHaveLength(3);
		expect(wheels.filter((wheel) => !build.includes(`"${wheel}"`))).toEqual([]);
	});
});
