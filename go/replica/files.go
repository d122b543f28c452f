package replica

import (
	"errors"
	"os"
	"path/filepath"
)

// ReplaceFile replaces a file of a state directory: a crash leaves the old content or the new one. It writes text to a temporary file in
// the directory of path, closes it, and renames it to path, unless check returns an error after the content was written: a write may take
// long. A nil check is none. If ReplaceFile returns an error, the temporary file may be left.
func ReplaceFile(temporary *os.File, path string, text []byte, check func() error) error {
	_, err := temporary.Write(text)
	err = errors.Join(err, temporary.Sync(), temporary.Close())
	if err == nil && check != nil {
		err = check()
	}
	if err != nil {
		return err
	}
	if err := os.Rename(temporary.Name(), path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path)) //nolint:gosec // the operator's directory
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
