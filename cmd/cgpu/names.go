// SPDX-License-Identifier: Apache-2.0

package main

// containerHelp says what a command takes for a container.
const containerHelp = "CONTAINER is an ID, a unique beginning of one, or the name that cgpu smi shows; of two that have one ID, under " +
	"two\n" +
	"engines or namespaces of containerd, it is the nonce, which cgpu smi shows for them."
