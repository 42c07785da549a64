/** Files that the bundler puts into the executable: importing one gives its path. */
declare module "*.so" {
	const path: string;
	export default path;
}
