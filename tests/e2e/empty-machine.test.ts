/**
 * The release on machines that have nothing else: an empty Debian, without compiler and Node.js, that debootstrap makes; with
 * MIMO_TEST_FULL=1 then the wheel and the npm package there, by Debian's pip and npm. Needs root, debootstrap, the network and
 * `npm run build:release`. MIMO_DEBIAN names the suites, bookworm (glibc 2.36) and with MIMO_TEST_FULL=1 bullseye (2.31)
 * unless told otherwise, and MIMO_DEBIAN_MIRROR where they come from.
 */
import { afterAll, describe, expect, test } from "bun:test";
import { copyFileSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { absent, hasPrograms } from "../absent.ts";

const [archive, wheel, npmPackage] = ["mimo-*-linux-x64.tar.zst", "mimo_train-*.whl", "mimo-train-*.tgz"].map(
	(name) => [...new Bun.Glob(`dist/release/${name}`).scanSync(".")][0],
);
const mirror = process.env.MIMO_DEBIAN_MIRROR ?? "http://deb.debian.org/debian";
const suites = (process.env.MIMO_DEBIAN ?? (process.env.MIMO_TEST_FULL ? "bookworm bullseye" : "bookworm")).split(" ");

/** Downloads, root's rights and some minutes are for machines that are asked. */
const wanted = process.env.MIMO_TEST_FULL === "1";
const possible =
	wanted &&
	hasPrograms(["debootstrap"], "debootstrap") &&
	(process.getuid?.() === 0 || absent("root, which debootstrap needs", "sudo") !== null) &&
	(archive !== undefined || absent("the release", "npm run build:release") !== null);

describe.skipIf(!possible)("in an empty Debian", () => {
	const folder = mkdtempSync(join(tmpdir(), "mimo-debian-"));
	afterAll(() => rmSync(folder, { recursive: true, force: true }), 60_000);

	for (const suite of suites) {
		const root = join(folder, suite);
		const inside = (script: string) => {
			// /proc and shared memory, as in a container. They go with the process.
			const mounts = `mount -t proc proc ${root}/proc && mount -t tmpfs shm ${root}/dev/shm`;
			const enter = `${mounts} && exec chroot ${root} /usr/bin/env -i PATH=/usr/bin:/bin HOME=/tmp sh -ec "$1"`;
			const { exitCode, stdout, stderr } = Bun.spawnSync(["unshare", "--mount", "sh", "-c", enter, "sh", script]);
			const said = `${stdout}${stderr}`;
			console.log(`${suite}$ ${script}\n${said}`);
			return { exitCode, said };
		};
		const name = basename(archive ?? "", ".tar.zst");

		test(`${suite}: unpacked, the release looks at the machine and trains on the digits`, () => {
			const made = Bun.spawnSync(["debootstrap", "--variant=minbase", "--include=zstd", suite, root, mirror]);
			expect([made.exitCode, made.exitCode === 0 ? "" : made.stdout.toString().slice(-500)]).toEqual([0, ""]);
			copyFileSync(archive!, join(root, basename(archive!)));
			expect(
				inside("for tool in cc gcc c++ node npm bun python3; do ! command -v $tool || exit 1; done").exitCode,
			).toBe(0);
			expect(inside(`zstd -dc /${name}.tar.zst | tar -xf - && ls ${name}`).exitCode).toBe(0);
			expect(inside(`cd ${name} && ./mimo --version`).said).toMatch(
				/^mimo \d.* libraries: cpu \(OpenBLAS.*, cuda, Bun/,
			);
			expect(inside(`cd ${name} && ./mimo doctor`)).toMatchObject({
				exitCode: 0,
				said: expect.stringContaining("Training can run here."),
			});
			const train = "./mimo train --config examples/vlm-tiny.yaml --train-iters 150 --eval-captions 128";
			const trained = inside(`cd ${name} && ${train}`);
			expect(trained.exitCode).toBe(0);
			const [, first, last] = /loss ([\d.]+) → ([\d.]+)\./.exec(trained.said)!;
			expect(Number(last)).toBeLessThan(0.5 * Number(first));
			expect(trained.said).toContain("Captions of 128 held-out pictures");
		}, 900_000);

		test.skipIf(process.env.MIMO_TEST_FULL !== "1")(
			`${suite}: installed by pip and by npm, the release trains`,
			() => {
				for (const file of [wheel!, npmPackage!]) copyFileSync(file, join(root, basename(file)));
				const apt = "apt-get --quiet=2 --option=Dpkg::Use-Pty=0";
				const tools = `${apt} update && ${apt} install --yes --no-install-recommends python3-pip npm`;
				const paths = "export PATH=$PATH:/usr/sbin:/sbin DEBIAN_FRONTEND=noninteractive";
				expect(inside(`${paths}; ${tools}`).exitCode).toBe(0);
				// Debian's Python wants to be told that pip may install beside its packages.
				const pip = `PIP_BREAK_SYSTEM_PACKAGES=1 pip install --no-index --quiet /${basename(wheel!)}`;
				const npm = `npm install --global --offline --prefix /npm /${basename(npmPackage!)}`;
				const train = "train --config examples/vlm-tiny.yaml --train-iters 30 --eval-captions 128";
				for (const [install, command] of [
					[pip, "/usr/local/bin/mimo"],
					[npm, "/npm/bin/mimo"],
				]) {
					expect(inside(install!).exitCode).toBe(0);
					const trained = inside(`cd ${name} && rm -rf runs/vlm-tiny && ${command} ${train}`);
					expect(trained).toMatchObject({ exitCode: 0, said: expect.stringMatching(/loss [\d.]+ → [\d.]+\./) });
				}
			},
			900_000,
		);
	}
});
