package pyapi

import (
	"encoding/json"
	"fmt"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/pyapi/ops"
)

// settings are the settings of the environment, read by torchft/_security.py: Go's own copy of the environment is from the moment
// when this library was loaded.
type settings struct {
	auth.Security
	Job string `json:"job"`
}

// parseSecurity reads settings in JSON, and checks the files that they name.
func parseSecurity(text string) (settings, error) {
	var s settings
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return s, fmt.Errorf("security: %w", err)
	}
	return s, ops.As(ops.Value, s.Validate())
}
