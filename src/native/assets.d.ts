/** Files that the bundler puts into the executable: importing one gives its path. */
declare module "*.so" {
	const path: string;
	export default path;
}
/** Importing one as text gives its content. */
declare module "*.py" {
	const content: string;
	export default content;
}
