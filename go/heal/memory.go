package heal

import (
	"fmt"
	"unsafe"
)

// Memory is memory that Python owns. Python keeps it alive until the Fetch or Offer that uses it is closed.
type Memory struct {
	regions [][]byte
	away    map[int]int64 // lengths of the regions on a device, by index: regions has nil for them
}

// onDevice stands for the address of a region on a device, which is copied through host memory.
const onDevice = -1

// NewMemory returns a Memory with regions, as pairs of address and length. It does not access them.
func NewMemory(pairs []int64) (*Memory, error) {
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

// region returns a slice of foreign memory, so that Go checks the bounds of each access.
func region(address, length int64) ([]byte, error) {
	switch {
	case length == 0:
		return nil, nil
	case address <= 0 || length < 0 || address+length < address:
		return nil, fmt.Errorf("address %#x with %d bytes is no memory", address, length)
	}
	// The garbage collector ignores the slice, since its memory was not allocated by Go.
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&address))), length), nil
}

// Sizes returns the lengths of the regions.
func (m *Memory) Sizes() []int64 {
	sizes := make([]int64, len(m.regions))
	for i, r := range m.regions {
		sizes[i] = max(int64(len(r)), m.away[i])
	}
	return sizes
}

// Working is called when a fetch or the service of a connection begins; its result, done, is called when that
// work ends. The process may give Go more processors meanwhile.
var Working = func() (done func()) { return func() {} }
