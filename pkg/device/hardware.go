package device

// Hardware is what NVML says of a GPU. nil is what it does not say.
type Hardware struct {
	Temperature *float64 `json:"temperature,omitempty"` // in degrees Celsius
	Power       *float64 `json:"power,omitempty"`       // in watts
	// ECC errors since the driver was loaded.
	Corrected   *uint64 `json:"corrected,omitempty"`
	Uncorrected *uint64 `json:"uncorrected,omitempty"`
	Xids        *uint64 `json:"xids,omitempty"` // critical ones, since somebody counts
}
