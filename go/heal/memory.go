package heal

import (
	"fmt"
	"unsafe"
)

// Memory is memory that Python owns and keeps alive until whoever uses it was ended.
type Memory struct {
	regions [][]byte
	away    map[int]int64 // lengths of those that are on a device: regions has nil for them
}

// onDevice is the address of a region that no processor reads: it goes through memory of the host.
const onDevice = -1

// Lend makes regions of pairs of address and length. It reads none of them.
func Lend(pairs []int64) (*Memory, error) {
	m := &Memory{regions: make([][]byte, len(pairs)/2), away: map[int]int64{}}
	for i := range m.regions {
		if pairs[2*i] == onDevice && pairs[2*i+1] > 0 {
			m.away[i] = pairs[2*i+1]
			continue
		}
		region, err := region(pairs[2*i], pairs[2*i+1])
		if err != nil {
			return nil, fmt.Errorf("region %d: %w", i, err)
		}
		m.regions[i] = region
	}
	return m, nil
}

// region is every access's bounds check: from here on it is a slice.
func region(address, length int64) ([]byte, error) {
	switch {
	case length == 0:
		return nil, nil
	case address <= 0 || length < 0 || address+length < address:
		return nil, fmt.Errorf("address %#x with %d bytes is no memory", address, length)
	}
	// not Go's memory, so its collector neither moves nor frees it
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&address))), length), nil
}

// Sizes are the lengths of the regions.
func (m *Memory) Sizes() []int64 {
	sizes := make([]int64, len(m.regions))
	for i, r := range m.regions {
		sizes[i] = max(int64(len(r)), m.away[i])
	}
	return sizes
}
