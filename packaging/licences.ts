/** Licences of the third-party parts of the executable. */
import { copyFileSync, existsSync, mkdirSync, readFileSync } from "node:fs";
import { join } from "node:path";

/** Debian packages of the executable's static libraries (build.ts). */
const debian = [
	"libopenblas-dev",
	"libjpeg62-turbo-dev",
	"libwebp-dev",
	"libgif-dev",
	"libdeflate-dev",
	"libstdc++-12-dev",
];

/** npm packages whose licence, MIT, is named in their package.json alone. */
const unlicensed = ["gearhash-jit"];

/** Copies every licence into a folder, named after its part; packaging/third-party.md names the parts. */
export function collectLicences(root: string, folder: string): void {
	mkdirSync(folder, { recursive: true });
	copyFileSync(join(root, "packaging/third-party.md"), join(folder, "README.md"));
	const { packages } = JSON.parse(readFileSync(join(root, "package-lock.json"), "utf8")) as {
		readonly packages: Readonly<Record<string, { [flag in "dev" | "optional" | "devOptional"]?: boolean }>>;
	};
	for (const [path, { dev, optional, devOptional }] of Object.entries(packages)) {
		if (path === "" || dev || optional || devOptional) continue;
		const name = path.slice("node_modules/".length);
		const [found] = new Bun.Glob("{LICENSE,LICENCE,license}*").scanSync(join(root, path));
		if (found === undefined && !unlicensed.includes(name)) throw new Error(`The npm package ${name} has no licence.`);
		if (found === undefined) continue;
		copyFileSync(join(root, path, found), join(folder, `${name.replace(/^@/, "").replace("/", "-")}.txt`));
	}
	for (const name of debian) {
		const file = `/usr/share/doc/${name}/copyright`;
		// Other distributions have other paths; third-party.md names the parts in any case.
		if (existsSync(file)) copyFileSync(file, join(folder, `${name}.txt`));
	}
	const wheels = new Bun.Glob("build/tools/*/nvidia_{cuda_runtime,cuda_cccl,cudnn_frontend}-*.dist-info/**/L*");
	for (const file of wheels.scanSync({ cwd: root })) {
		const name = /nvidia_([a-z_\d]+)-/.exec(file)![1]!;
		copyFileSync(join(root, file), join(folder, `nvidia-${name}.txt`));
	}
}
