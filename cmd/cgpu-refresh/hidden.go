// SPDX-License-Identifier: Apache-2.0

package main

// Nobody looks into this process.
import _ "github.com/opencgpu/cgpu/pkg/nodump"
